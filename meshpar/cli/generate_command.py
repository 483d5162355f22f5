"""`meshpar generate`: prompts continued by the model of a run or of a folder of Hugging Face's, on all devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshpar.cli.convert_command import layout_of, where_options
from meshpar.cli.main import print_json
from meshpar.sharding.errors import problem
from meshpar.sharding.host_resources import check_unicode

if TYPE_CHECKING:
    from meshpar.data.tokens import Tokenizer


@click.command()
@click.argument("folder", metavar="RUN|DIR", type=click.Path())
@click.option("--prompt", "prompts", metavar="TEXT", multiple=True, required=True, help="May be repeated.")
@click.option("--tokens", metavar="N", default=100, show_default=True, type=click.IntRange(1, 2**20), help="To add.")
@click.option("--temperature", metavar="T", default=1.0, show_default=True, help="0 takes the likeliest always.")
@click.option("--top-k", metavar="K", type=int, help="Draw among the K likeliest tokens only.")
@click.option("--top-p", metavar="P", type=float, help="Draw among the likeliest that have that probability together.")
@click.option("--seed", metavar="N", default=0, show_default=True, type=click.IntRange(0, 2**32 - 1), help="Draws.")
@click.option("--tokenizer", metavar="JSON", help="A tokenizer.json, or `bytes`; without it, the folder's own.")
@click.option("--json", "as_json", is_flag=True, help="Print prompts, tokens and texts as JSON.")
@where_options
def generate(
    folder: str, prompts: tuple[str, ...], tokens: int, temperature: float, top_k: int | None, top_p: float | None,
    seed: int, tokenizer: str | None, as_json: bool, mesh: str | None, strategy: str | None, dtype: str | None,
    devices: int | None,
) -> None:  # fmt: skip
    """Continue prompts, as in `meshpar generate runs/gpt_stdlib --prompt 'def ' --tokens 40 --top-p 0.9`.

    The model lies sharded over the mesh, and so does the cache of keys and values. Prompts of as many tokens are one
    batch. A text ends where the model says so (`eos_token_id` of config.json); one that is to go beyond its
    `max_position_embeddings` is told of.
    """
    for text in prompts:
        check_unicode(text, "--prompt")
    layout = layout_of(mesh, strategy, devices)
    from meshpar.interop.runs import opened

    words = _tokenizer(Path(folder), tokenizer)
    config, state = opened(folder, mesh=layout[0], strategy=layout[1], dtype=dtype)
    encode = getattr(words, "encode_prompt", words.encode)
    encoded = [encode(text).astype("int32").tolist() for text in prompts]
    _check_prompts(prompts, encoded, config.vocab_size)
    said = _said(Path(folder))
    ends, room, most = _ends(said), said.get("max_position_embeddings"), max(map(len, encoded)) + tokens
    if isinstance(room, int) and most > room:
        click.echo(f"note: {most:,} tokens go beyond the {room:,} positions that config.json says it knows", err=True)
    found: dict[int, list[int]] = {}
    for length in sorted({len(ids) for ids in encoded}):
        numbers = [number for number, ids in enumerate(encoded) if len(ids) == length]
        batch = [encoded[number] for number in numbers]
        made = continued(
            state, config, batch, num_tokens=tokens, seed=seed, temperature=temperature, top_k=top_k, top_p=top_p
        )
        found |= {number: _cut(ids[length:], ends) for number, ids in zip(numbers, made, strict=True)}
    texts = [words.decode(_array(encoded[number] + found[number])) for number in range(len(prompts))]
    if as_json:
        rows = zip(prompts, (found[number] for number in range(len(prompts))), texts, strict=True)
        print_json([dict(zip(("prompt", "tokens", "text"), row, strict=True)) for row in rows])
        return
    for text in texts:
        click.echo("".join(c if c.isprintable() or c in "\n\t" else "�" for c in text))  # no control codes of a model's


def continued(state: Any, config: Any, batch: list[list[int]], *, num_tokens: int, seed: int, **how: Any) -> Any:
    """Prompts of one length, continued: [prompts, positions] on the host."""
    import jax
    import numpy as np

    from meshpar.models.sampling import generate as sample
    from meshpar.sharding.context import use_rules

    setup = state.setup

    def run(params: Any, extra: Any, prompt: Any, key: Any) -> Any:
        with use_rules(setup.mesh, setup.strategy):
            return sample(setup.model.bind(params, extra), prompt, config=config, num_tokens=num_tokens, key=key, **how)

    made = jax.jit(run)(state.params, state.extra, np.asarray(batch, np.int32), jax.random.key(seed))
    return np.asarray(made).tolist()


def _array(ids: list[int]) -> Any:
    import numpy as np

    return np.asarray(ids, np.int32)


def _tokenizer(folder: Path, named: str | None) -> Tokenizer:
    """That of the command, of the folder, or of the run's recipe."""
    from meshpar.data.tokens import load_tokenizer
    from meshpar.interop.files import read_json
    from meshpar.interop.runs import SOURCE_FOLDER

    if named is None:
        files = [folder / "tokenizer.json", folder / SOURCE_FOLDER / "tokenizer.json"]
        named = next((str(file) for file in files if file.exists()), None)
    if named is None and (folder / "recipe.json").exists():
        data = read_json(folder / "recipe.json").get("data")
        named = data.get("tokenizer") if isinstance(data, dict) else None
    if named is None:
        exists = "neither it nor its recipe has a tokenizer"
        raise problem(f"folder `{folder}`", "turn text into tokens", exists, "name one: --tokenizer tokenizer.json")
    return load_tokenizer(named)


def _check_prompts(prompts: tuple[str, ...], encoded: list[list[int]], vocab_size: int) -> None:
    for text, ids in zip(prompts, encoded, strict=True):
        if not ids:
            raise problem("--prompt", f"continue {text!r}", "it has no token", "begin with one token at least")
        if max(ids) >= vocab_size:
            exists = f"the tokenizer gives {max(ids)}, and the model knows {vocab_size} tokens"
            raise problem("--prompt", f"continue {text[:60]!r}", exists, "name the model's own: --tokenizer")


def _said(folder: Path) -> dict[str, Any]:
    """The config.json of a folder, or of the one that a run came from; empty where there is none."""
    from meshpar.interop.files import read_json
    from meshpar.interop.hf import CONFIG
    from meshpar.interop.runs import SOURCE_FOLDER

    files = [path / CONFIG for path in (folder, folder / SOURCE_FOLDER) if (path / CONFIG).exists()]
    return read_json(files[0]) if files else {}


def _ends(said: dict[str, Any]) -> set[int]:
    """Tokens at which a text ends."""
    given = said.get("eos_token_id")
    return {one for one in (given if isinstance(given, list) else [given]) if isinstance(one, int)}


def _cut(ids: list[int], ends: set[int]) -> list[int]:
    end = next((at for at, one in enumerate(ids) if one in ends), len(ids))
    return ids[:end]
