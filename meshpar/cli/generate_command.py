"""Command `meshpar generate`: sample text from the model of a run or of a Hugging Face folder."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshpar.cli.convert_command import layout_of, where_options
from meshpar.cli.main import print_json
from meshpar.sharding.errors import near_or, problem
from meshpar.sharding.host_resources import check_unicode, is_url

if TYPE_CHECKING:
    from meshpar.data.tokens import Tokenizer


@click.command()
@click.argument("folder", metavar="RUN|DIR", type=click.Path())
@click.option(
    "--prompt", "prompts", metavar="TEXT", multiple=True, required=True, help="Text to continue; can be repeated."
)
@click.option(
    "--tokens", metavar="N", default=100, show_default=True, type=click.IntRange(1, 2**20), help="Number of new tokens."
)
@click.option(
    "--temperature", metavar="T", default=1.0, show_default=True, help="Sampling temperature; 0 is greedy decoding."
)
@click.option("--top-k", metavar="K", type=int, help="Sample from the K most probable tokens.")
@click.option(
    "--top-p", metavar="P", type=float, help="Sample from the most probable tokens whose probabilities sum to P."
)
@click.option(
    "--seed", metavar="N", default=0, show_default=True, type=click.IntRange(0, 2**32 - 1), help="Random seed."
)
@click.option("--tokenizer", metavar="JSON", help="A tokenizer.json, or `bytes`.  [default: tokenizer of the folder]")
@click.option("--json", "as_json", is_flag=True, help="Print prompts, tokens and texts as JSON.")
@where_options
def generate(
    folder: str, prompts: tuple[str, ...], tokens: int, temperature: float, top_k: int | None, top_p: float | None,
    seed: int, tokenizer: str | None, as_json: bool, mesh: str | None, strategy: str | None, dtype: str | None,
    devices: int | None,
) -> None:  # fmt: skip
    """Continue prompts: `meshpar generate runs/gpt_stdlib --prompt 'def ' --tokens 40 --top-p 0.9`.

    The model and its key-value cache are sharded over the mesh. Prompts with the same number of tokens form a batch.
    A text ends at an `eos_token_id` of config.json. A note is printed if a text can exceed `max_position_embeddings`.
    """
    for text in prompts:
        check_unicode(text, "--prompt")
    layout = layout_of(mesh, strategy, devices)
    import numpy as np

    from meshpar.interop.files import read_json
    from meshpar.interop.hf import CONFIG
    from meshpar.pod.callback_failures import end_on_callback_failures
    from meshpar.runs.folder import run_folder
    from meshpar.runs.sample import continued
    from meshpar.runs.saved_run import SOURCE_FOLDER, opened

    end_on_callback_failures()
    if not (is_url(folder) or Path(folder).is_dir()):
        names = sorted(str(path) for path in Path(folder).parent.glob("*/"))
        reason, fix = "there is no such folder", near_or(folder, names, "name a folder below runs/")
        raise problem(f"run `{folder[:200]}`", "read its model", reason, fix, code="missing-file")
    with run_folder(folder) as run:
        coder = _tokenizer(run.local, tokenizer)
        config, state = opened(run, mesh=layout[0], strategy=layout[1], dtype=dtype)
        folders = [run.local, run.local / SOURCE_FOLDER]  # the second one if a run was converted
        hf_folder = next((path for path in folders if (path / CONFIG).exists()), None)
        hf_config = {} if hf_folder is None else read_json(hf_folder / CONFIG)
        eos_ids = [] if hf_folder is None else stop_ids(hf_folder)
    encode = getattr(coder, "encode_prompt", coder.encode)
    encoded = [encode(text).astype("int32").tolist() for text in prompts]
    for text, ids in zip(prompts, encoded, strict=True):
        if not ids or max(ids) >= config.vocab_size:
            reason, fix = "the tokenizer returned no tokens", "use a longer prompt"
            if ids:
                reason = f"token {max(ids)} is outside of the vocabulary of {config.vocab_size}"
                fix = "use the tokenizer of the model: --tokenizer"
            raise problem("--prompt", f"continue {text[:60]!r}", reason, fix, code="out-of-range")
    max_positions = hf_config.get("max_position_embeddings")
    if isinstance(max_positions, int) and (length := max(map(len, encoded)) + tokens) > max_positions:
        click.echo(f"note: {length:,} tokens exceed the {max_positions:,} positions in config.json", err=True)
    new_tokens: dict[int, list[int]] = {}
    for length in sorted({len(ids) for ids in encoded}):
        numbers = [number for number, ids in enumerate(encoded) if len(ids) == length]
        options: Any = {"num_tokens": tokens, "seed": seed, "temperature": temperature, "top_k": top_k, "top_p": top_p}
        outputs = continued(state, config, [encoded[number] for number in numbers], **options)
        for number, ids in zip(numbers, outputs, strict=True):
            new_tokens[number] = list(itertools.takewhile(lambda token: token not in eos_ids, ids[length:]))
    texts = [coder.decode(np.asarray(ids + new_tokens[number], np.int32)) for number, ids in enumerate(encoded)]
    if as_json:
        rows = zip(prompts, (new_tokens[number] for number in range(len(prompts))), texts, strict=True)
        print_json([dict(zip(("prompt", "tokens", "text"), row, strict=True)) for row in rows])
        return
    for text in texts:
        # Replace control codes, which could change the state of the terminal.
        click.echo("".join(c if c.isprintable() or c in "\n\t" else "�" for c in text))


def stop_ids(folder: Path) -> list[int]:
    """Return the token ids that end a text: `eos_token_id` in generation_config.json, or in config.json."""
    from meshpar.interop.files import read_json
    from meshpar.interop.hf import CONFIG, GENERATION_CONFIG

    files = [folder / name for name in (GENERATION_CONFIG, CONFIG) if (folder / name).exists()]
    eos: Any = next((x for file in files if (x := read_json(file).get("eos_token_id")) is not None), [])
    return eos if isinstance(eos, list) else [eos]


def _tokenizer(folder: Path, named: str | None) -> Tokenizer:
    """Load the tokenizer of the command line, of the folder or of the recipe, in this order."""
    from meshpar.data.tokens import load_tokenizer
    from meshpar.interop.files import read_json
    from meshpar.runs.saved_run import SOURCE_FOLDER

    if named is None:
        files = [folder / "tokenizer.json", folder / SOURCE_FOLDER / "tokenizer.json"]
        named = next((str(file) for file in files if file.exists()), None)
    if named is None and (folder / "recipe.json").exists():
        data = read_json(folder / "recipe.json").get("data")
        named = data.get("tokenizer") if isinstance(data, dict) else None
    if named is None:
        reason, fix = "neither the folder nor its recipe has a tokenizer", "add --tokenizer tokenizer.json"
        raise problem(f"folder `{folder}`", "tokenize the prompts", reason, fix, code="not-found")
    return load_tokenizer(named)
