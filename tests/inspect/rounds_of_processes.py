"""One of two processes of a pod that take a step with a round of latencies, each by a clock of its own."""

from __future__ import annotations

import dataclasses
import json
import sys

import jax
import numpy as np

from meshpar.hardware.compile_options import PROFILE


def main(number: int, port: int) -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=number)

    import meshpar as mp
    from meshpar.hardware.clusters import parse_cluster
    from meshpar.inspect import latencies
    from meshpar.training import step as steps
    from tests.inspect.test_latencies import simulation, step_and_state

    steps.why_no_rounds = lambda mesh: ""
    latencies.cluster_here = lambda devices: parse_cluster("h100:1x8")
    profiles = []

    def clock(what, program, *_):
        # The second round is quicker by process 0's clock, slower by that of process 1.
        time_s = 5.0 - len(profiles) if number == 0 else 1.0 + len(profiles)
        times = dataclasses.replace(simulation(float(number), time_s), cluster="h100:1x8")
        return latencies.Candidate(what=what, program=program, collectives=(), timeline=times)

    latencies.simulated = clock
    step, state = step_and_state(mp.MeshSpec(fsdp=4).build(), latency_rounds=1)
    jitted = step._jit

    def seen(setup, options, lies):
        profiles.append(options.get(PROFILE, b"").decode())
        return jitted(setup, options, lies)

    step._jit = seen
    rows = jax.make_array_from_callback((8, 8), state.setup.batch_sharding, lambda at: np.ones((8, 8), np.float32)[at])
    _, metrics = step(state, {"x": rows})
    print(json.dumps({"profiles": profiles, "kept": step.rounds.kept, "loss": float(metrics["loss"])}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
