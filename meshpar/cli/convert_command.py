"""`meshpar convert`: a folder of Hugging Face's as a run, and a run as such a folder."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from meshpar.cli.main import devices_option, layout_options, options, prepare_devices, select_devices, traceback_option
from meshpar.sharding.errors import MeshparError


def _names_other_layouts(command: Callable[..., None]) -> Callable[..., None]:
    """Sizes that the default layout does not divide: how another is named."""

    @functools.wraps(command)
    def run(**given: Any) -> None:
        try:
            command(**given)
        except MeshparError as error:
            if given["mesh"] is None and given["strategy"] is None and error.code == "indivisible":
                error.add_note("no layout was named: --mesh fsdp=N takes fewer devices, --devices 1 splits nothing")
            raise

    return run


where_options = options(
    layout_options,
    click.option("--dtype", metavar="DTYPE", help="Of the weights, as bfloat16; without it, as they are."),
    devices_option,
    traceback_option,
    _names_other_layouts,
)


def layout_of(mesh: str | None, strategy: str | None, devices: int | None) -> tuple[Any, Any]:
    """A mesh on the devices there are, and a strategy; by default each device holds an equal part of all."""
    prepare_devices(devices)
    here = select_devices(devices)
    from meshpar.parallel import parse_strategy
    from meshpar.sharding.mesh import MeshSpec

    return MeshSpec.parse(mesh or "fsdp=-1").build(here), parse_strategy(strategy or "fsdp()")


@click.group()
def convert() -> None:
    """Hugging Face's folders to runs, and runs to such folders. Needs `pip install meshpar[hf]`."""


@convert.command("from-hf")
@click.argument("source", metavar="DIR", type=click.Path())
@click.argument("out", metavar="OUT", type=click.Path())
@click.option("--adapter", metavar="DIR", type=click.Path(), help="Merge the adapters of a folder of PEFT's into it.")
@where_options
def from_folder(
    source: str, out: str, adapter: str | None, mesh: str | None, strategy: str | None, dtype: str | None,
    devices: int | None,
) -> None:  # fmt: skip
    """DIR, with config.json and safetensors files, as the run OUT: a checkpoint that restores onto any mesh.

    As in `meshpar convert from-hf Llama-3.1-8B runs/llama --mesh fsdp=8`.
    """
    layout = layout_of(mesh, strategy, devices)
    from meshpar.interop.files import whole_folder
    from meshpar.interop.hf import config_of, from_hf
    from meshpar.interop.peft import load_peft, lora_of_peft
    from meshpar.interop.runs import CHECKPOINTS, RUN_MODE, keep_source_files, merged
    from meshpar.loop.checkpoint import Checkpoints

    with whole_folder(out, mode=RUN_MODE) as folder:
        lora = None if adapter is None else lora_of_peft(adapter, config_of(source), like=source)
        config, state = from_hf(source, mesh=layout[0], strategy=layout[1], dtype=dtype, lora=lora)
        if adapter is not None:
            state = merged(load_peft(state, config, adapter, like=source), config)
        keep_source_files(source, folder)
        with Checkpoints(folder / CHECKPOINTS) as checkpoints:
            checkpoints.save(state, wait=True)
    click.echo(f"{out}: {state.num_params:,} parameters in {config.param_dtype}, {config.num_layers} layers")


@convert.command("to-hf")
@click.argument("run", metavar="RUN", type=click.Path())
@click.argument("out", metavar="DIR", type=click.Path())
@click.option("--step", metavar="N", type=int, help="Which checkpoint; without it the newest.")
@where_options
def to_folder(
    run: str, out: str, step: int | None, mesh: str | None, strategy: str | None, dtype: str | None,
    devices: int | None,
) -> None:  # fmt: skip
    """The run RUN as the folder DIR, which transformers reads.

    As in `meshpar convert to-hf runs/finetune_hf finetuned --dtype bfloat16`.
    """
    layout = layout_of(mesh, strategy, devices)
    from meshpar.interop.files import new_folder
    from meshpar.interop.hf import to_hf
    from meshpar.interop.runs import like_of, opened

    new_folder(out)  # minutes before it is written
    config, state = opened(run, mesh=layout[0], strategy=layout[1], step=step)
    to_hf(state, config, out, like=like_of(Path(run)), dtype=dtype)
    click.echo(f"{out}: {state.num_params:,} parameters in {dtype or config.param_dtype}")


@convert.command("to-peft")
@click.argument("run", metavar="RUN", type=click.Path())
@click.argument("out", metavar="DIR", type=click.Path())
@click.option("--step", metavar="N", type=int, help="Which checkpoint; without it the newest.")
@click.option("--base", metavar="NAME", help="The model they belong to, as PEFT is to find it.")
@where_options
def to_adapter(
    run: str, out: str, step: int | None, base: str | None, mesh: str | None, strategy: str | None, dtype: str | None,
    devices: int | None,
) -> None:  # fmt: skip
    """The adapters that the run RUN trained, and nothing else, as the folder DIR, which PEFT reads.

    As in `meshpar convert to-peft runs/lora adapter --base meta-llama/Llama-3.1-8B`.
    """
    layout = layout_of(mesh, strategy, devices)
    from meshpar.interop.files import new_folder
    from meshpar.interop.peft import to_peft
    from meshpar.interop.runs import like_of, restored_run

    new_folder(out)
    config, state = restored_run(Path(run), mesh=layout[0], strategy=layout[1], step=step)
    to_peft(state, config, out, like=like_of(Path(run)), base=base, dtype=dtype)
    click.echo(f"{out}: adapters of rank {state.setup.model.lora.rank}")
