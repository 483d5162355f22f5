"""Conversations: rendered by the sandbox, packed, and learnt where the assistant speaks."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.cli.recipe import load_recipe
from meshpar.cli.train_command import _data_line, train
from meshpar.data import ChatData, streams
from meshpar.data.chat import Conversation, Template, packed
from meshpar.models import TransformerConfig, next_token_loss
from tests.interop.test_untrusted import check_parts

pytest.importorskip("jinja2", reason="renders templates: pip install meshpar[hf]")
RECIPE = Path(__file__).parents[2] / "recipes" / "finetune_hf.py"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% if m.role == 'assistant' %}$\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHATS = [
    [{"role": "user", "content": f"q{i}é"}, {"role": "assistant", "content": "yes" * (i % 3 + 1)},
     {"role": "user", "content": "and"}, {"role": "assistant", "content": f"no{i}"}] for i in range(40)
]  # fmt: skip


def chats(tmp_path, **changes):
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    given = {
        "files": (str(tmp_path / "chats.jsonl"),),
        "tokenizer": "bytes",
        "template": str(tmp_path / "template.jinja"),
    }
    return ChatData(**{**given, "seq_len": 128, "valid_fraction": 0.3, **changes})


def test_rows_hold_conversations_of_which_the_assistants_words_are_learnt(tmp_path):
    source = chats(tmp_path).open(batch_size=2, seed=0)
    with source.train() as batches:
        batch = {name: np.asarray(x) for name, x in next(batches).items()}
    assert {name: (x.shape, x.dtype.name) for name, x in batch.items()} == {
        name: (x.shape, x.dtype.name) for name, x in chats(tmp_path).batch_shapes(2).items()
    }
    for row in range(2):
        learnt = source.decode(batch["targets"][row][batch["weights"][row] == 1])
        said = [part for part in learnt.split("$\n") if part]
        assert all(part.startswith(("yes", "no")) for part in said), learnt
        assert batch["segments"][row].max() > 1
        for segment in range(1, batch["segments"][row].max() + 1):
            where = batch["segments"][row] == segment
            np.testing.assert_array_equal(batch["positions"][row][where], np.arange(where.sum()))
            assert source.decode(batch["inputs"][row][where]).startswith("<user>q")
    facts = source.describe()
    assert facts["train"]["conversations"] + facts["valid"]["conversations"] == 40
    assert facts["train"]["learnt_tokens"] < facts["train"]["tokens"]


def test_what_lies_in_temporary_files_are_the_same_rows(tmp_path, monkeypatch):
    expected = chats(tmp_path).open(batch_size=2, seed=0)
    monkeypatch.setattr(streams, "_IN_MEMORY_BYTES", 100)
    source = chats(tmp_path).open(batch_size=2, seed=0)
    assert source.describe() == expected.describe()
    with source.train() as batches, expected.train() as wanted:
        jax.tree.map(np.testing.assert_array_equal, next(batches), next(wanted))
    # For good: a run that goes on reads the same rows.
    assert source.describe()["fingerprint"] == "b3b0f8b301a64d49b4bdd4e60c84e291"


def test_packing_keeps_every_token_and_cuts_what_is_too_long():
    rng = np.random.default_rng(0)
    found = [
        Conversation(rng.integers(1, 9, n), rng.integers(0, 2, n).astype(np.int32)) for n in rng.integers(2, 14, 50)
    ]
    rows = packed(found, 9)
    assert (rows["segments"] > 0).sum() == sum(min(len(one.ids), 10) - 1 for one in found)
    assert rows["weights"].sum() == sum(one.is_learnt[1:10].sum() for one in found)
    assert not rows["weights"][rows["segments"] == 0].any()
    assert len(rows["inputs"]) < len(found)


def test_a_packed_row_is_learnt_as_its_conversations_alone(tmp_path):
    config = TransformerConfig(
        vocab_size=256, num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=16
    )
    mesh = mp.MeshSpec().build(jax.devices()[:1])
    state = mp.init_state(config.build(), optax.identity(), mesh=mesh, strategy=mp.ddp(), key=0)
    found = [Conversation(np.arange(1, n), (np.arange(1, n) > 2).astype(np.int32)) for n in (5, 8, 4)]

    @jax.jit
    def losses(params, rows):
        with mp.use_rules(mesh, mp.ddp()):
            return next_token_loss(config.build().bind(params, {}), rows, None)[0]

    together = losses(state.params, packed(found, 16))
    alone = [losses(state.params, packed([one], 16)) for one in found]
    assert int(together.weight) == sum(one.is_learnt[1:].sum() for one in found)
    np.testing.assert_allclose(together.total, sum(one.total for one in alone), rtol=1e-5)


def test_errors_of_conversations_and_settings_have_four_parts(tmp_path):
    template = Template(TEMPLATE, {}, where="template")
    for wrong in (None, [], "text", ["x"], [{"content": "x"}], [{"role": "user", "contents": "x"}]):
        with pytest.raises(mp.MeshparError, match="line 1"):
            template.render("line 1", wrong)
    for change, match in (
        ({"field": "message"}, "did you mean `messages`"),
        ({"template": None}, "find a chat template"),
        ({"seq_len": float("nan")}, "a whole number"),
        ({"tokenizer": None}, r"ChatData.tokenizer`: cannot use None"),
        ({"files": (5,)}, "a tuple of one or more names"),
        ({"date": "today"}, "it is no day"),
        ({"seq_len": 3}, "have a word of the assistant's within seq_len"),
    ):
        with pytest.raises(mp.MeshparError, match=match):
            chats(tmp_path, **change).open(batch_size=2, seed=0)


FORGETS = """{%- set last = namespace(user=0) %}{%- for m in messages %}
{%- if m.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}{{- '[' + m.role + ']' }}
{%- if m.role == 'assistant' and loop.index0 > last.user %}
{{- '<think>' + m.reasoning_content | default('') + '</think>' }}{%- endif %}
{{- m.content + '.' }}{%- endfor %}{%- if add_generation_prompt %}{{- '[assistant]' }}{%- endif %}
"""  # of earlier turns it leaves out the reasoning, and of the last one it writes a block even where there is none


def test_turns_that_are_written_otherwise_later_are_learnt_behind_what_is_written_before_them():
    thinking = [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "B"},
        {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"},
        {"role": "tool", "content": "e"}, {"role": "assistant", "content": "f", "reasoning_content": "F"},
        {"role": "user", "content": "thanks"},
    ]  # fmt: skip
    found = Template(FORGETS, {}, where="template").render("line 1", thinking)
    assert [(text, [text[slice(*span)] for span in spans]) for text, spans in found] == [
        ("[user]a.[assistant]<think>B</think>b.", ["<think>B</think>b."]),
        (
            "[user]a.[assistant]b.[user]c.[assistant]<think></think>d.[tool]e.[assistant]<think>F</think>f.",
            ["<think></think>d.", "<think>F</think>f."],
        ),
    ]
    marking = FORGETS.replace("{{- m.content + '.' }}", "{% generation %}{{- m.content + '.' }}{% endgeneration %}")
    ((text, spans),) = Template(marking, {}, where="template").render("line 1", thinking[:4])
    assert text == "[user]a.[assistant]b.[user]c.[assistant]<think></think>d."
    assert [text[slice(*span)] for span in spans] == ["a.", "b.", "c.", "d."]
    with pytest.raises(mp.MeshparError, match="has a surrogate"):
        Template(marking, {}, where="template").render("line 1", [{"role": "user", "content": "\ud800a\udfff"}])


def test_parts_of_a_conversation_are_held_out_together_and_told(tmp_path):
    data = chats(tmp_path, seq_len=192)
    plain = data.open(batch_size=2, seed=0).describe()
    (tmp_path / "template.jinja").write_text(FORGETS)
    source = data.open(batch_size=2, seed=0)
    facts = source.describe()
    assert (plain["in_parts"], facts["in_parts"]) == (0, 40)
    assert "40 conversations in parts" in _data_line(facts)
    assert "in parts" not in _data_line(plain)
    assert [facts[side]["conversations"] for side in ("train", "valid")] == [28, 12]
    asked = []
    for rows in source._packed:
        texts = [
            source.decode(rows["inputs"][row][rows["segments"][row] == segment])
            for row in range(len(rows["inputs"]))
            for segment in range(1, rows["segments"][row].max() + 1)
        ]
        asked.append({text.partition("é")[0] for text in texts})
        assert len(texts) == 2 * len(asked[-1])
    assert not asked[0] & asked[1]
    learnt = sum(facts[side]["learnt_tokens"] for side in ("train", "valid"))
    assert learnt == sum(len(f"<think></think>{one['content']}.") for chat in CHATS for one in chat[1::2])


def test_templates_write_json_and_the_day_as_transformers_does():
    source = "{{ messages | tojson(separators=(',', ':'), sort_keys=true) }}{{ strftime_now('%d %b %Y') }}"
    ((text, _),) = Template(source, {}, where="template").render("line 1", [{"role": "user", "content": "<é>"}])
    assert text == '[{"content":"<é>","role":"user"}]26 Jul 2024'


TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Sum <a> & é", "parameters": {
        "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a"]}}}
]  # fmt: skip
WITH_TOOLS = (
    "{% if not tools is defined %}{% set tools = none %}{% endif %}{% if tools is not none %}{{ tools | tojson }}\n"
    "{% endif %}{% for d in documents or [] %}[{{ d.title }}|{{ d['text'] }}]{% endfor %}" + TEMPLATE
)
SAID = "<user>q<assistant>y$\n"
CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "y"}]


def test_tools_and_documents_are_rendered_as_transformers_does():
    """The texts are those of `apply_chat_template(tools=..., documents=...)` of transformers 5.24."""
    template, documents = Template(WITH_TOOLS, {}, where="template"), [{"title": "T", "text": "x é"}]
    schema = (
        '[{"type": "function", "function": {"name": "add", "description": "Sum <a> & é", "parameters": {"type": '
        '"object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a"]}}}]\n'
    )
    for given, before in (
        ({}, ""), ({"tools": TOOLS}, schema), ({"tools": json.dumps(TOOLS)}, schema), ({"tools": []}, "[]\n"),
        ({"documents": documents}, "[T|x é]"), ({"tools": TOOLS, "documents": documents}, schema + "[T|x é]"),
    ):  # fmt: skip
        ((text, spans),) = template.render("line 1", CHAT, **given)
        assert text == before + SAID
        assert [text[slice(*span)] for span in spans] == ["y$\n"]
    for wrong in ("add", 3, [3], {"name": "add"}, '{"name": "add"}', "[" * 10_000):
        with pytest.raises(mp.MeshparError, match="line 1: cannot render its `tools`"):
            template.render("line 1", CHAT, tools=wrong)


@pytest.mark.parametrize("kind", ["config", "files"])
def test_a_release_may_have_a_template_of_its_own_for_tools(kind, tmp_path):
    named = {"default": TEMPLATE, "tool_use": "T{{ tools | length }}" + TEMPLATE}
    config = {"chat_template": [{"name": name, "template": one} for name, one in named.items()]}
    if kind == "config":
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    else:
        (tmp_path / "chat_template.jinja").write_text(named["default"])
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(named["tool_use"])
    template = Template.of(str(tmp_path), None)
    assert template.render("line 1", CHAT)[0].text == SAID
    assert template.render("line 1", CHAT, tools=TOOLS)[0].text == "T1" + SAID


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_records_give_their_tools_and_other_fields_are_counted(kind, tmp_path, caplog):
    records = [{"messages": chat, "tools": TOOLS, "id": number} for number, chat in enumerate(CHATS)]
    records[0]["source"], name = "web", f"records.{kind}"
    if kind == "parquet":  # whose structs have all fields of all, null where a record has none
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        other = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "strict": True}}}]
        records[1]["tools"] = other
        parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / name)
    else:
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    data = chats(tmp_path, files=(str(tmp_path / name),), seq_len=512)
    (tmp_path / "template.jinja").write_text(WITH_TOOLS)
    with caplog.at_level("WARNING"):
        facts = data.open(batch_size=1, seed=0)
    # Columns of a table are fields of all its rows.
    assert facts.describe()["unused_fields"] == {"id": 40, "source": 1 if kind == "jsonl" else 40}
    (line,) = [record.getMessage() for record in caplog.records]
    assert "nothing reads these fields of the records: `id` (40 records)" in line
    assert "nothing reads the fields id (40 records)" in _data_line(facts.describe())
    rows = facts._packed[0]
    text = facts.decode(rows["inputs"][0][rows["segments"][0] == 1])
    assert text.startswith(json.dumps(TOOLS, ensure_ascii=False) + "\n<user>q")
    (tmp_path / "template.jinja").write_text(TEMPLATE)  # which reads no tools
    assert data.open(batch_size=1, seed=0).describe()["unused_fields"]["tools"] == 40


def test_reasoning_is_found_under_each_of_its_names():
    fields = ("reasoning_content", "thinking", "reasoning")
    for read in fields:
        source = f"{{% for m in messages %}}{{{{ m.{read} }}}}{{{{ m.content }}}}{{% endfor %}}"
        template = Template(source, {}, where="template")
        for given in fields:
            answer = {"role": "assistant", "content": "y", given: "why "}
            assert template.render("line 1", [CHAT[0], answer])[-1].text == "qwhy y"
    # Of two that differ each template reads its own, but `reasoning_content` is always the first there is.
    answer = {"role": "assistant", "content": "y", "reasoning": "b", "thinking": "a", "reasoning_content": None}
    source = "{% for m in messages %}{{ m.thinking }}{{ m.reasoning }}{{ m.reasoning_content }}{% endfor %}"
    assert Template(source, {}, where="template").render("line 1", [answer])[-1].text == "aba"


def test_broken_conversations_are_an_error_in_four_parts_or_fine():
    rng, template, fine = random.Random(0), Template(TEMPLATE, {}, where="template"), 0
    strange = [
        None,
        -1,
        2**63,
        float("nan"),
        "",
        "\ud800",
        "{{ 1 }}",
        [],
        [[]],
        {},
        {"role": "assistant"},
        True,
        "9" * 99,
    ]
    for _ in range(300):
        chat = json.loads(json.dumps(rng.choice(CHATS)))
        message = rng.choice(chat)
        message[rng.choice([*message, "more"])] = rng.choice(strange)
        try:
            template.render("line 1", rng.choice([chat, chat, chat, message, rng.choice(strange)]))
            fine += 1
        except mp.MeshparError as error:
            check_parts(error)
    assert 0 < fine < 300


def test_parquet_and_the_template_of_a_folder(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<user>": 0, "[UNK]": 1, "x": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    table = pyarrow.table({"chat": [[{**one, "name": None} for one in chat] for chat in CHATS]})
    parquet.write_table(table, tmp_path / "chats.parquet")
    data = ChatData(
        files=(str(tmp_path / "chats.parquet"),), field="chat", tokenizer=str(tmp_path), seq_len=64, valid_fraction=0.3
    )
    source = data.open(batch_size=1, seed=0)
    assert source.describe()["train"]["learnt_tokens"] > 0
    ((text, spans),) = Template.of(str(tmp_path), None).render("row 1", CHATS[0])
    assert text.startswith("<s><user>q0")
    assert [text[slice(*span)] for span in spans] == ["yes$\n", "no0$\n"]


MEASURED = """
import sys, threading
from meshpar.data import ChatData

def held():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

def data(name):
    return ChatData(files=(name,), tokenizer="bytes", template="template.jinja", seq_len=1024)

data("few.jsonl").open(batch_size=1, seed=0)  # what is imported in any case
before, peak, over = held(), 0, threading.Event()

def watch():
    global peak
    while not over.wait(0.01):
        peak = max(peak, held() - before)

thread = threading.Thread(target=watch)
thread.start()
source = data("many.jsonl").open(batch_size=16, seed=0)
with source.train() as batches:
    next(batches), source.fingerprint, source.describe()
over.set()
thread.join()
print(peak)
"""


@pytest.mark.matrix
def test_many_conversations_take_little_memory(tmp_path):
    line = json.dumps({"messages": [{**one, "content": one["content"] * 200} for one in CHATS[0]]}) + "\n"
    for name, num_bytes in (("few", 20_000), ("many", 60_000_000)):
        (tmp_path / f"{name}.jsonl").write_text(line * (num_bytes // len(line)))
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    done = subprocess.run([sys.executable, "-c", MEASURED], cwd=tmp_path, capture_output=True, text=True, check=True)
    print(f"{int(done.stdout) / 1e6:.0f} MB")
    assert int(done.stdout) < 250_000_000  # rows alone are 1.2 GB


@pytest.mark.matrix
def test_a_recipe_trains_on_conversations(tmp_path):
    recipe = load_recipe(RECIPE, devices=8).override("steps=2", "lora.rank=2", "accumulate=2", "batch_size=16")
    recipe = recipe.override("optimizer.warmup_steps=0", "sample.num_tokens=4")
    recipe = recipe.replace(data=chats(tmp_path, valid_batches=1, seq_len=24, valid_fraction=0.45))
    outcome = train(recipe, out=tmp_path, stream=io.StringIO())
    assert outcome.summary["validation"]["loss"] > 0
    written = json.loads((outcome.folder / "recipe.json").read_text())
    assert written["data"]["type"] == "ChatData"
    assert written["lora"]["rank"] == 2
