"""Pipeline schedules as immutable tables that can be printed, validated and simulated without jax."""

from __future__ import annotations

from meshpar.schedules.makers import SCHEDULES as SCHEDULES
from meshpar.schedules.makers import dualpipe as dualpipe
from meshpar.schedules.makers import dualpipe_v as dualpipe_v
from meshpar.schedules.makers import eager_1f1b as eager_1f1b
from meshpar.schedules.makers import gpipe as gpipe
from meshpar.schedules.makers import interleaved_1f1b as interleaved_1f1b
from meshpar.schedules.makers import make as make
from meshpar.schedules.makers import one_f_one_b as one_f_one_b
from meshpar.schedules.makers import zb_h1 as zb_h1
from meshpar.schedules.makers import zb_h2 as zb_h2
from meshpar.schedules.makers import zb_v as zb_v
from meshpar.schedules.ops import KINDS as KINDS
from meshpar.schedules.ops import StageOp as StageOp
from meshpar.schedules.schedule import Schedule as Schedule
from meshpar.schedules.simulate import ScheduleTimeline as ScheduleTimeline
from meshpar.schedules.simulate import Simulation as Simulation
from meshpar.schedules.slots import Slots as Slots
