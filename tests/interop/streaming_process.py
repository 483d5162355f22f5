"""Script that reads a checkpoint of a given size over eight host devices and prints its memory use.

`RssAnon` is the memory of the process itself. The kernel may drop pages of mapped files, which are counted separately.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import meshpar as mp
from meshpar.interop import from_hf
from meshpar.interop.block_fp8 import SCALE

STEP_S = 0.002
BLOCK = 128


def held(field: str = "RssAnon") -> int:
    """Bytes, of `/proc/self/status`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def make(folder: Path, num_bytes: int, *, in_8_bits: bool = False) -> None:
    """A Llama of about that size in float32, one file a layer, written layer by layer; layers in 8 bits, if so."""
    from safetensors.numpy import save_file

    width, hidden, vocab, heads = 1024, 4096, 8192, 8
    layer_bytes = 4 * (4 * width * width + 3 * width * hidden)
    layers = max((num_bytes - 8 * vocab * width) // layer_bytes, 1)
    rng = np.random.default_rng(0)

    def random(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    held_by: dict[str, str] = {}

    def save(tensors: dict[str, np.ndarray]) -> None:
        file = f"part-{len(set(held_by.values()))}.safetensors"
        save_file(tensors, str(folder / file))
        held_by.update(dict.fromkeys(tensors, file))

    save({name: random(vocab, width) for name in ("model.embed_tokens.weight", "lm_head.weight")})
    save({"model.norm.weight": random(width)})
    shapes = {f"self_attn.{x}_proj": (width, width) for x in "qkvo"}
    shapes |= {"mlp.gate_proj": (hidden, width), "mlp.up_proj": (hidden, width), "mlp.down_proj": (width, hidden)}
    shapes |= {"input_layernorm": (width,), "post_attention_layernorm": (width,)}  # type: ignore[dict-item]
    for layer in range(layers):
        tensors = {f"model.layers.{layer}.{name}.weight": random(*shape) for name, shape in shapes.items()}
        for name, x in [*tensors.items()] if in_8_bits else []:
            if x.ndim == 2:
                tensors |= {name: x.astype(jnp.float8_e4m3fn), name + SCALE: random(*(n // BLOCK for n in x.shape))}
        save(tensors)
    config = {
        "model_type": "llama", "vocab_size": vocab, "hidden_size": width, "intermediate_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads,
    }  # fmt: skip
    if in_8_bits:
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps(config))
    index = {"metadata": {}, "weight_map": held_by}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def main() -> None:
    folder, strategy = Path(sys.argv[1]), mp.fsdp() | mp.tensor_parallel()
    mesh = mp.MeshSpec(fsdp=4, tensor=2).build()
    jax.block_until_ready(jax.jit(lambda x: x + 1)(1))  # jax's own
    before, most, stop = held(), [0], threading.Event()

    def watch() -> None:
        while not stop.wait(STEP_S):
            most[0] = max(most[0], held())

    watching = threading.Thread(target=watch)
    watching.start()
    _, state = from_hf(folder, mesh=mesh, strategy=strategy, dtype="float32")
    stop.set()
    watching.join()
    share = sum(shard.data.nbytes for x in jax.tree.leaves(state) for shard in x.addressable_shards)
    print(json.dumps({"share": share, "before": before, "after": held(), "peak": most[0], "file": held("RssFile")}))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        make(Path(sys.argv[1]), int(sys.argv[2]), in_8_bits=sys.argv[3] == "fp8")
    else:
        main()
