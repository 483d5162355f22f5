"""Small models of other packages, with losses and batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import meshpar as mp
from meshpar.sharding.adapters.model import Model

ROWS, SEQ, VOCAB, WIDTH, LABELS = 32, 8, 64, 32, 8
IDS = np.zeros((ROWS, SEQ), np.int32)
PLACES = np.broadcast_to(np.arange(SEQ, dtype=np.int32), IDS.shape)
PIXELS = np.zeros((ROWS, 3, 16, 16), np.float32)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with its loss and batches."""

    model: Model
    loss: Callable[..., Any]
    """(model, batch) -> scalar."""
    batch: Callable[[np.random.Generator], Any]
    paths: dict[str, Any]
    """Rules by path that shard layers over `tensor`."""
    rules: mp.Rules = dataclasses.field(default_factory=mp.Rules)
    """Rules for logical names of the model. They are added to each strategy."""
    costly: str = "nothing"
    """Pattern of modules whose activations must be resharded, which `explain` correctly reports."""
    loss_is: str = "mean_over_examples"
    """Meaning of the loss in a step that divides the batch."""


def tokens(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return the loss of next tokens."""
    drawn = rng.integers(0, VOCAB, (ROWS, SEQ + 1), dtype=np.int32)
    return {"inputs": drawn[:, :-1], "targets": drawn[:, 1:]}


def images(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return images with channels first, as processors of transformers do."""
    pixels = rng.normal(size=PIXELS.shape).astype(np.float32)
    return {"inputs": pixels, "targets": rng.integers(0, LABELS, ROWS, dtype=np.int32)}


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def causal_mask(rows: int) -> jax.Array:
    return jnp.broadcast_to(jnp.tril(jnp.ones((SEQ, SEQ), bool)), (rows, SEQ, SEQ))


def language_model(module: Any, args: str, paths: dict[str, Any]) -> Case:
    """Return the Linen module of a transformers model, called with token ids and further arrays by keyword."""

    def inputs(ids):
        places = jnp.broadcast_to(PLACES[:1], ids.shape)
        arrays = {"ids": ids, "ones": jnp.ones_like(ids), "zeros": ids * 0, "places": places, "none": None}
        return [arrays[name] for name in args.split()]

    def loss(model, batch):
        return cross_entropy(model(*inputs(batch["inputs"])).logits, batch["targets"])

    return Case(mp.from_linen(module, *inputs(IDS)), loss, tokens, paths)


# ---- transformers, Linen ---------------------------------------------------------------------------------------------


def gpt2() -> Case:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=SEQ, n_embd=WIDTH, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    )  # fmt: skip
    module = transformers.FlaxGPT2LMHeadModel(config, _do_init=False).module
    # Kernels of `Conv1D` have the shape (out, in).
    paths = {r".*/(c_attn|c_fc)/kernel": ("tensor", "fsdp"), r".*/h/.*/c_proj/kernel": ("fsdp", "tensor")}
    return language_model(module, "ids ones places", paths)


ENCODER_SPLIT = {
    r".*/(query|key|value|intermediate/dense)/kernel": ("fsdp", "tensor"),
    r".*/layer/.*/output/dense/kernel": ("tensor", "fsdp"),
}


def bert() -> Case:
    import transformers

    config = transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=SEQ, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    module = transformers.FlaxBertForMaskedLM(config, _do_init=False).module
    return language_model(module, "ids ones zeros places none", ENCODER_SPLIT)


def vit() -> Case:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16,
        patch_size=4, num_labels=LABELS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    module = transformers.FlaxViTForImageClassification(config, _do_init=False).module
    # The module expects channels last.
    return Case(
        mp.from_linen(module, PIXELS.transpose(0, 2, 3, 1)),
        lambda model, batch: cross_entropy(model(batch["inputs"].transpose(0, 2, 3, 1)).logits, batch["targets"]),
        images,
        ENCODER_SPLIT,
    )


def llama() -> Case:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64,
    )  # fmt: skip
    module = transformers.FlaxLlamaForCausalLM(config, _do_init=False).module
    paths = {r".*/(q|k|v|gate|up)_proj/kernel": ("fsdp", "tensor"), r".*/(o|down)_proj/kernel": ("tensor", "fsdp")}
    return language_model(module, "ids ones places", paths)


def resnet() -> Case:
    import transformers

    config = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=LABELS
    )
    module = transformers.FlaxResNetForImageClassification(config, _do_init=False).module

    def loss(model, batch):
        logits = model(batch["inputs"].transpose(0, 2, 3, 1), deterministic=False).logits
        return cross_entropy(logits, batch["targets"])

    paths = {r".*/convolution/kernel": (None, None, None, "tensor")}
    # Batch normalization computes its statistics for each micro-step.
    return Case(mp.from_linen(module, PIXELS.transpose(0, 2, 3, 1)), loss, images, paths, loss_is="sum_over_parts")


def bart() -> Case:
    import transformers

    config = transformers.BartConfig(
        vocab_size=VOCAB, d_model=WIDTH, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=SEQ, dropout=0.0,
    )  # fmt: skip
    module = transformers.FlaxBartForConditionalGeneration(config, _do_init=False).module
    paths = {
        r".*/(q_proj|k_proj|v_proj|fc1)/kernel": ("fsdp", "tensor"),
        r".*/(out_proj|fc2)/kernel": ("tensor", "fsdp"),
    }
    return language_model(module, "ids ones ids ones places places", paths)


# ---- Other packages, Linen -------------------------------------------------------------------------------------------


def unet() -> Case:
    import diffusers

    module = diffusers.FlaxUNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), block_out_channels=(32, 64), layers_per_block=1,
        attention_head_dim=8, cross_attention_dim=32,
    )  # fmt: skip
    sample, times = np.zeros((ROWS, 4, 8, 8), np.float32), np.zeros(ROWS, np.int32)
    words = np.zeros((ROWS, 4, 32), np.float32)

    def batch(rng):
        drawn = {name: rng.normal(size=x.shape).astype(np.float32) for name, x in (("x", sample), ("words", words))}
        return {**drawn, "noise": rng.normal(size=sample.shape).astype(np.float32), "times": times + 7}

    def loss(model, batch):
        return ((model(batch["x"], batch["times"], batch["words"]).sample - batch["noise"]) ** 2).mean()

    paths = {r".*/(to_q|to_k|to_v)/kernel": ("fsdp", "tensor"), r".*/to_out_0/kernel": ("tensor", "fsdp")}
    return Case(mp.from_linen(module, sample, times, words), loss, batch, paths)


def nano_moe() -> Case:
    from nano_moe import NanoMoE, NanoMoEConfig

    config = NanoMoEConfig(
        vocab_size=VOCAB, n_layers=2, n_heads=4, d_model=WIDTH, d_ff=64, n_experts=3, block_size=SEQ, dropout_rate=0.0
    )

    def loss(model, batch):
        logits, aux = model(batch["inputs"])
        return cross_entropy(logits, batch["targets"]) + 0.01 * aux

    paths = {r".*/expert_\d/Dense_0/kernel": ("fsdp", "tensor"), r".*/expert_\d/Dense_1/kernel": ("tensor", "fsdp")}
    # It indexes the outputs of experts with three arrays, so XLA cannot derive that examples are not moved. The
    # auxiliary loss is a product of means over the examples of a micro-step.
    costly = r".*/MoELayer_.*|.*/NanoMoE"
    return Case(mp.from_linen(NanoMoE(config), IDS), loss, tokens, paths, costly=costly, loss_is="sum_over_parts")


# ---- NNX -------------------------------------------------------------------------------------------------------------


def _tunix(cls: Any, config: Any, **more: Any) -> Case:
    def loss(model, batch):
        ids = batch["inputs"]
        places = jnp.broadcast_to(PLACES[:1], ids.shape)
        return cross_entropy(model(ids, places, None, causal_mask(ids.shape[0]))[0], batch["targets"])

    return Case(mp.from_nnx(lambda rngs: cls(config, rngs=rngs)), loss, tokens, **more)


TUNIX = {
    "num_layers": 2, "vocab_size": VOCAB, "embed_dim": WIDTH, "hidden_dim": 64, "num_heads": 4, "head_dim": 8,
    "num_kv_heads": 2, "norm_eps": 1e-6, "rope_theta": 10_000,
}  # fmt: skip


NAMES = mp.Rules(
    paths={
        "embedder/input_embedding": mp.names("vocab", "embed"),
        "lm_head/w": mp.names("embed", "vocab"),
        ".*/q_proj/w": mp.names("embed", "heads", "head_dim"),
        ".*/[kv]_proj/w": mp.names("embed", "kv_heads", "head_dim"),
        ".*/o_proj/w": mp.names("heads", "head_dim", "embed"),
        ".*/(gate|up)_proj/kernel": mp.names("embed", "mlp"),
        ".*/down_proj/kernel": mp.names("mlp", "embed"),
        ".*norm.*": mp.replicated,
    }
)
"""Rules for tunix, whose logical names are its mesh axes `fsdp` and `tp`."""
SPLIT = {
    ".*/[qkv]_proj/w": ("fsdp", "tensor"),
    ".*/o_proj/w": ("tensor", None, "fsdp"),
    ".*/(gate|up)_proj/kernel": ("fsdp", "tensor"),
    ".*/down_proj/kernel": ("tensor", "fsdp"),
}


def tunix_llama() -> Case:
    from tunix.models.llama3 import model

    return _tunix(model.Llama3, model.ModelConfig(**TUNIX), paths=SPLIT, rules=NAMES)


def tunix_qwen3() -> Case:
    from tunix.models.qwen3 import model

    return _tunix(model.Qwen3, model.ModelConfig(**TUNIX), paths=SPLIT, rules=NAMES)


def mamba2() -> Case:
    import mamba2_jax

    config = mamba2_jax.Mamba2Config(
        vocab_size=VOCAB, hidden_size=WIDTH, state_size=8, head_dim=16, chunk_size=4, num_hidden_layers=2
    )
    return Case(
        mp.from_nnx(lambda rngs: mamba2_jax.Mamba2ForCausalLM(config, rngs=rngs)),
        lambda model, batch: cross_entropy(model(batch["inputs"])["logits"], batch["targets"]),
        tokens,
        {r".*/out_proj/kernel": ("tensor", "fsdp")},
    )


def graph() -> Case:
    """Each example is a graph."""
    from jraphx.nn.models import GCN

    def batch(rng):
        return {
            "nodes": rng.normal(size=(ROWS, 6, 16)).astype(np.float32),
            "edges": rng.integers(0, 6, (ROWS, 2, 12), dtype=np.int32),
            "targets": rng.integers(0, LABELS, (ROWS, 6), dtype=np.int32),
        }

    return Case(
        mp.from_nnx(lambda rngs: GCN(16, WIDTH, 2, LABELS, rngs=rngs)),
        lambda model, batch: cross_entropy(
            mp.constrain(jax.vmap(model)(batch["nodes"], batch["edges"]), "batch", None, None), batch["targets"]
        ),
        batch,
        {r".*/kernel": ("fsdp", "tensor")},
    )


# ---- Plain functions -------------------------------------------------------------------------------------------------


def equinox() -> Case:
    import equinox as eqx

    class Net(eqx.Module):
        embed: eqx.nn.Embedding
        attention: eqx.nn.MultiheadAttention
        norm: eqx.nn.LayerNorm
        mlp: eqx.nn.MLP

        def __init__(self, key):
            keys = jax.random.split(key, 3)
            self.embed = eqx.nn.Embedding(VOCAB, WIDTH, key=keys[0])
            self.attention = eqx.nn.MultiheadAttention(4, WIDTH, key=keys[1])
            self.norm = eqx.nn.LayerNorm(WIDTH)
            self.mlp = eqx.nn.MLP(WIDTH, VOCAB, 64, 1, key=keys[2])

        def __call__(self, ids):
            x = jax.vmap(self.embed)(ids)
            x = x + self.attention(x, x, x, mask=jnp.tril(jnp.ones((SEQ, SEQ), bool)))
            return jax.vmap(lambda x: self.mlp(self.norm(x)))(x)

    # Values that are not arrays are created once, outside of the function.
    static = eqx.partition(
        eqx.filter_eval_shape(Net, jax.random.key(0)), lambda x: isinstance(x, jax.ShapeDtypeStruct)
    )[1]

    def apply(params, ids):
        logits = jax.vmap(eqx.combine(params, static))(mp.constrain(ids, "batch", None))
        return mp.constrain(logits, "batch", None, None)

    return Case(
        mp.from_functions(lambda key: eqx.partition(Net(key), eqx.is_array)[0], apply),
        lambda model, batch: cross_entropy(model(batch["inputs"]), batch["targets"]),
        tokens,
        {r"mlp/layers/0/weight": ("tensor", "fsdp"), r"mlp/layers/1/weight": ("fsdp", "tensor")},
    )


def haiku() -> Case:
    import haiku as hk

    def forward(ids):
        x = mp.constrain(hk.Embed(VOCAB, WIDTH)(ids), "batch", None, None)
        mask = jnp.tril(jnp.ones((1, 1, SEQ, SEQ), bool))
        attention = hk.MultiHeadAttention(4, 8, model_size=WIDTH, w_init=hk.initializers.VarianceScaling())
        x = mp.constrain(x + attention(x, x, x, mask), "batch", None, None)
        x = hk.LayerNorm(-1, True, True)(x)
        return mp.constrain(hk.nets.MLP([64, VOCAB])(x), "batch", None, None)

    net = hk.without_apply_rng(hk.transform(forward))
    return Case(
        mp.from_functions(lambda key: net.init(key, IDS), net.apply),
        lambda model, batch: cross_entropy(model(batch["inputs"]), batch["targets"]),
        tokens,
        {r"mlp/~/linear_0/w": ("fsdp", "tensor"), r"mlp/~/linear_1/w": ("tensor", "fsdp")},
    )


CASES = {
    case.__name__: case
    for case in (
        gpt2, bert, vit, llama, resnet, bart, unet, nano_moe, tunix_llama, tunix_qwen3, mamba2, graph, equinox, haiku
    )
}  # fmt: skip
