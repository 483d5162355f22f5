"""Commands `meshpar convert`: convert between runs and Hugging Face folders."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from meshpar.cli.main import devices_option, options, prepare_devices, select_devices, traceback_option
from meshpar.sharding.errors import MeshparError


def _suggest_layouts(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command so that errors about sizes that FSDP cannot shard suggest --mesh and --devices."""

    @functools.wraps(command)
    def run(**kwargs: Any) -> None:
        try:
            command(**kwargs)
        except MeshparError as error:
            if kwargs["mesh"] is None and kwargs["strategy"] is None and error.code == "indivisible":
                error.add_note("use fewer devices with --mesh fsdp=N, or a single device with --devices 1")
            raise

    return run


where_options = options(
    click.option(
        "--mesh",
        metavar="AXES",
        help="Mesh, as in fsdp=64,tensor=8. -1 takes the remaining devices.  [default: fsdp=-1]",
    ),
    click.option(
        "--strategy",
        metavar="STRATEGY",
        help="Strategy, as in 'fsdp() | tensor_parallel(sequence=True)'.  [default: fsdp()]",
    ),
    click.option("--dtype", metavar="DTYPE", help="Cast the weights to a dtype, such as bfloat16."),
    devices_option,
    traceback_option,
    _suggest_layouts,
)


def layout_of(mesh: str | None, strategy: str | None, devices: int | None) -> tuple[Any, Any]:
    """Return the mesh and the strategy. The default is FSDP over all devices."""
    prepare_devices(devices)
    selected = select_devices(devices)
    from meshpar.parallel import parse_strategy
    from meshpar.sharding.mesh import MeshSpec

    return MeshSpec.parse(mesh or "fsdp=-1").build(selected), parse_strategy(strategy or "fsdp()")


@click.group()
def convert() -> None:
    """Convert between runs and Hugging Face folders. Requires `pip install meshpar[hf]`."""


@convert.command("from-hf", short_help="Convert a Hugging Face folder to a run.")
@click.argument("source", metavar="DIR", type=click.Path())
@click.argument("out", metavar="OUT", type=click.Path())
@click.option("--adapter", metavar="DIR", type=click.Path(), help="Merge the adapters of a PEFT folder.")
@where_options
def from_folder(
    source: str, out: str, adapter: str | None, mesh: str | None, strategy: str | None, dtype: str | None,
    devices: int | None,
) -> None:  # fmt: skip
    """Convert DIR, with config.json and safetensors files, to the run OUT, which can be restored on any mesh.

    For example: `meshpar convert from-hf Llama-3.1-8B runs/llama --mesh fsdp=8`.
    """
    layout = layout_of(mesh, strategy, devices)
    from meshpar.interop.files import whole_folder
    from meshpar.interop.hf import config_of, from_hf
    from meshpar.interop.peft import load_peft, lora_of_peft
    from meshpar.loop.checkpoint import Checkpoints
    from meshpar.runs.saved_run import CHECKPOINTS, RUN_MODE, keep_source_files, merged

    with whole_folder(out, mode=RUN_MODE) as folder:
        lora = None if adapter is None else lora_of_peft(adapter, config_of(source), like=source)
        config, state = from_hf(source, mesh=layout[0], strategy=layout[1], dtype=dtype, lora=lora)
        if adapter is not None:
            state = merged(load_peft(state, config, adapter, like=source), config)
        keep_source_files(source, folder)
        with Checkpoints(folder / CHECKPOINTS) as checkpoints:
            checkpoints.save(state, wait=True)
    click.echo(f"{out}: {state.num_params:,} parameters in {config.param_dtype}, {config.num_layers} layers")


@convert.command("to-hf", short_help="Convert a run to a Hugging Face folder.")
@click.argument("run", metavar="RUN", type=click.Path())
@click.argument("out", metavar="DIR", type=click.Path())
@click.option("--step", metavar="N", type=int, help="Step of the checkpoint.  [default: latest]")
@where_options
def to_folder(
    run: str, out: str, step: int | None, mesh: str | None, strategy: str | None, dtype: str | None,
    devices: int | None,
) -> None:  # fmt: skip
    """Convert RUN to the folder DIR, which transformers can load.

    For example: `meshpar convert to-hf runs/finetune_hf finetuned --dtype bfloat16`.
    """
    layout = layout_of(mesh, strategy, devices)
    from meshpar.interop.files import new_folder, read_json
    from meshpar.interop.hf import CONFIG, dtype_in, to_hf
    from meshpar.runs.folder import run_folder
    from meshpar.runs.saved_run import opened, text_fields

    new_folder(out)  # check it before the weights are read, which can take minutes
    with run_folder(run) as folder:
        config, state = opened(folder, mesh=layout[0], strategy=layout[1], step=step, merge=False)
        fields = text_fields(folder.local) if config.source is None else None
        document = read_json(to_hf(state, config, out, dtype=dtype, fields=fields) / CONFIG)
    click.echo(f"{out}: {config.num_params:,} parameters in {dtype_in(document)}")


@convert.command("to-peft", short_help="Write the adapters of a run to a PEFT folder.")
@click.argument("run", metavar="RUN", type=click.Path())
@click.argument("out", metavar="DIR", type=click.Path())
@click.option("--step", metavar="N", type=int, help="Step of the checkpoint.  [default: latest]")
@click.option("--base", metavar="NAME", help="Name of the base model for PEFT.")
@where_options
def to_adapter(
    run: str, out: str, step: int | None, base: str | None, mesh: str | None, strategy: str | None, dtype: str | None,
    devices: int | None,
) -> None:  # fmt: skip
    """Write the adapters that RUN trained to the folder DIR, which PEFT can load.

    For example: `meshpar convert to-peft runs/lora adapter --base meta-llama/Llama-3.1-8B`.
    """
    layout = layout_of(mesh, strategy, devices)
    from meshpar.interop.files import new_folder
    from meshpar.interop.peft import to_peft
    from meshpar.runs.folder import run_folder
    from meshpar.runs.saved_run import restored_run

    new_folder(out)
    with run_folder(run) as folder:
        config, state = restored_run(folder, mesh=layout[0], strategy=layout[1], step=step)
        to_peft(state, config, out, base=base, dtype=dtype)
    click.echo(f"{out}: adapters of rank {state.setup.model.lora.rank}")
