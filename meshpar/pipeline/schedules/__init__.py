"""Pipeline schedules as data: tables that are printed, checked, timed and saved without a device, and without jax."""

from __future__ import annotations

from meshpar.pipeline.schedules.makers import SCHEDULES as SCHEDULES
from meshpar.pipeline.schedules.makers import dualpipe as dualpipe
from meshpar.pipeline.schedules.makers import dualpipe_v as dualpipe_v
from meshpar.pipeline.schedules.makers import eager_1f1b as eager_1f1b
from meshpar.pipeline.schedules.makers import gpipe as gpipe
from meshpar.pipeline.schedules.makers import interleaved_1f1b as interleaved_1f1b
from meshpar.pipeline.schedules.makers import make as make
from meshpar.pipeline.schedules.makers import one_f_one_b as one_f_one_b
from meshpar.pipeline.schedules.makers import zb_h1 as zb_h1
from meshpar.pipeline.schedules.makers import zb_h2 as zb_h2
from meshpar.pipeline.schedules.makers import zb_v as zb_v
from meshpar.pipeline.schedules.ops import KINDS as KINDS
from meshpar.pipeline.schedules.ops import StageOp as StageOp
from meshpar.pipeline.schedules.schedule import Schedule as Schedule
from meshpar.pipeline.schedules.simulate import ScheduleTimeline as ScheduleTimeline
from meshpar.pipeline.schedules.simulate import Simulation as Simulation
from meshpar.pipeline.schedules.slots import Slots as Slots
