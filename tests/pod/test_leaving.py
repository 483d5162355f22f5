"""Processes of a pod end with the exit code that they agreed on, also if a process is late or lost."""

from __future__ import annotations

import signal
import textwrap

import pytest

from tests.pod.pods import free_port, run_together

CODE = 128 + signal.SIGTERM
PROCESS = textwrap.dedent("""
    import os, signal, sys, time
    import jax, numpy as np
    from meshpar.pod import launch
    from meshpar.pod import multihost as together
    from meshpar.pod import watchdog as watchdog

    plant, here = os.environ["PLANT"], int(os.environ["RANK"])
    watchdog.BEAT_S = 1e-4 if plant == "busy" else watchdog.BEAT_S  # a thread is inside the client at any moment
    watchdog._LEAVE_S = 10.0 if plant == "lost" else watchdog._LEAVE_S
    launch.join(alone=True, timeout_s=120)
    with together.pod(stall_s=300, command={}):
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
        whole = np.ones(mesh.size, np.float32)
        split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        ones = jax.make_array_from_callback(whole.shape, split, lambda index: whole[index])
        assert jax.jit(lambda x: x.sum())(ones) == mesh.size
        try:
            if plant == "inside" and here == 1:
                time.sleep(6.0)
            sys.exit(int(os.environ["CODE"]))
        finally:
            import atexit  # what is registered last comes first, before jax's own
            if plant == "late" and here == 0:
                atexit.register(time.sleep, 6.0)
            if plant == "lost" and here == 2:
                atexit.register(os.kill, os.getpid(), signal.SIGKILL)
""")


@pytest.mark.matrix
@pytest.mark.parametrize("plant", ["busy", "late", "inside", "lost"])
def test_all_end_with_the_code_they_agreed_on(plant: str, child_env: dict[str, str]) -> None:
    pod = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    pod |= {"PLANT": plant, "CODE": str(CODE), "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    envs = [{**child_env, **pod, "RANK": str(number), "LOCAL_RANK": str(number)} for number in range(3)]
    done = run_together(PROCESS, envs)
    codes = [process.returncode for process in done]
    assert codes == [CODE, CODE, -signal.SIGKILL if plant == "lost" else CODE], done
