"""Tests of conversations: rendering, packing, and the weights of answers."""

from __future__ import annotations

import dataclasses
import io
import json
import random
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pyarrow
import pytest
import tokenizers
from pyarrow import parquet

import meshpar as mp
from meshpar.data import ChatData, streams
from meshpar.data.chat import Conversation, Template, packed, tokens_of
from meshpar.data.tokens import load_tokenizer
from meshpar.models import TransformerConfig, next_token_loss
from meshpar.runs.recipe_file import load_recipe
from meshpar.runs.report import data_line
from meshpar.runs.training_run import run
from tests.errors import raises
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
    files, template = (str(tmp_path / "chats.jsonl"),), str(tmp_path / "template.jinja")
    options = {"files": files, "tokenizer": "bytes", "template": template, "seq_len": 128, "valid_fraction": 0.3}
    return ChatData(**{**options, **changes})


def test_rows_have_weights_only_for_answers(tmp_path):
    source = chats(tmp_path).open(batch_size=2, seed=0)
    with source.train() as batches:
        batch = {name: np.asarray(x) for name, x in next(batches).items()}
    assert {name: (x.shape, x.dtype.name) for name, x in batch.items()} == {
        name: (x.shape, x.dtype.name) for name, x in chats(tmp_path).batch_shapes(2).items()
    }
    for row in range(2):
        answers = source.decode(batch["targets"][row][batch["weights"][row] == 1])
        assert all(part.startswith(("yes", "no")) for part in answers.split("$\n") if part), answers
        assert batch["segments"][row].max() > 1
        for segment in range(1, batch["segments"][row].max() + 1):
            mask = batch["segments"][row] == segment
            np.testing.assert_array_equal(batch["positions"][row][mask], np.arange(mask.sum()))
            assert source.decode(batch["inputs"][row][mask]).startswith("<user>q")
    info = source.describe()
    assert info["train"]["conversations"] + info["valid"]["conversations"] == 40
    assert info["train"]["learnt_tokens"] < info["train"]["tokens"]


TURNS = (
    "{% for m in messages %}<{{ m.role }}>: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>: {% endif %}"
)


def turn_tokenizer(path):
    """Write a byte-level tokenizer with a token for ` four`, and with special tokens for the roles."""
    vocab = {token: i for i, token in enumerate([*tokenizers.pre_tokenizers.ByteLevel.alphabet(), "ou", "fou", "four"])}
    vocab["Ġfour"] = len(vocab)
    merges = [("o", "u"), ("f", "ou"), ("fou", "r"), ("Ġ", "four")]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False)
    tokenizer.add_special_tokens(["<user>", "<assistant>"])
    tokenizer.save(str(path / "tokenizer.json"))
    return load_tokenizer(str(path), separator="")


def test_an_answer_that_contains_its_stop_token_is_unchanged(tmp_path):
    tokenizer = turn_tokenizer(tmp_path)
    stop = tokenizer.encode("!").tolist()  # not a special token
    ids = tokenizer.encode("<user>é four!")
    for text, expected in (("<user>é four!", ids), ("<user>é four", ids), ("<user>é four!<user>", [*ids, ids[0]])):
        (tokens, is_answer), num_unended = tokens_of(tokenizer, text, [(7, 12 + text.count("!"))], stop)
        assert tokens.tolist() == list(expected)
        assert is_answer.tolist() == [0, 0, 0, 1, 1, 0][: len(expected)]
        assert num_unended == 0


@pytest.mark.parametrize("stop_tokens", [(), ("<user>",)])
@pytest.mark.parametrize("tagged", [True, False])
def test_overlapping_tokens_and_the_role_after_an_answer_are_trained(tagged, stop_tokens, tmp_path, caplog):
    """Like GLM's, the template ends an answer with the next role. transformers 5.24 also trains ` four`."""
    tokenizer = turn_tokenizer(tmp_path)
    source = TURNS if tagged else TURNS.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    (tmp_path / "chat_template.jinja").write_text(source)
    chat = [("user", "2 + 2?"), ("assistant", "four"), ("user", "és?"), ("assistant", "four é")]
    messages = [{"role": role, "content": content} for role, content in chat]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": messages}) + "\n") * 4)
    data = ChatData(
        files=(str(tmp_path / "chats.jsonl"),), tokenizer=str(tmp_path), seq_len=80, valid_fraction=0.5,
        stop_tokens=stop_tokens,
    )  # fmt: skip
    with caplog.at_level("WARNING"):
        opened = data.open(batch_size=1, seed=0)
    rows = opened._packed[0]
    is_first = rows["segments"][0] == 1
    targets = rows["targets"][0][is_first & (rows["weights"][0] == 1)]
    stop = tokenizer.encode("<user>").tolist() if stop_tokens else []
    first, second = (tokenizer.encode(text).tolist() for text in (" four", " four é"))
    assert len(first) == 1
    assert targets.tolist() == [*first, *stop, *second, *stop]
    num_unended = 0 if stop_tokens else 8
    assert opened.describe()["unended_answers"] == num_unended
    assert ("8 answers end without a special token" in caplog.text) == (num_unended > 0)
    assert ("8 answers end without" in data_line(opened.describe())) == (num_unended > 0)
    with raises("unknown-name", "ChatData.stop_tokens"):
        dataclasses.replace(data, stop_tokens=("<users>",)).open(batch_size=1, seed=0)


def test_temporary_files_have_the_same_rows(tmp_path, monkeypatch):
    expected = chats(tmp_path).open(batch_size=2, seed=0)
    monkeypatch.setattr(streams, "_IN_MEMORY_BYTES", 100)
    source = chats(tmp_path).open(batch_size=2, seed=0)
    assert source.describe() == expected.describe()
    with source.train() as batches, expected.train() as expected_batches:
        jax.tree.map(np.testing.assert_array_equal, next(batches), next(expected_batches))
    # A different fingerprint would prevent existing runs from resuming.
    assert source.describe()["fingerprint"] == "b3b0f8b301a64d49b4bdd4e60c84e291"


def test_packed_keeps_all_tokens_up_to_seq_len():
    rng = np.random.default_rng(0)
    conversations = [
        Conversation(rng.integers(1, 9, n), rng.integers(0, 2, n).astype(np.int32)) for n in rng.integers(2, 14, 50)
    ]
    rows = packed(conversations, 9)
    assert (rows["segments"] > 0).sum() == sum(min(len(x.ids), 10) - 1 for x in conversations)
    assert rows["weights"].sum() == sum(x.is_answer[1:10].sum() for x in conversations)
    assert not rows["weights"][rows["segments"] == 0].any()
    assert len(rows["inputs"]) < len(conversations)


def test_packed_row_has_the_loss_of_its_conversations(tmp_path):
    config = TransformerConfig(
        vocab_size=256, num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=16
    )
    mesh = mp.MeshSpec().build(jax.devices()[:1])
    state = mp.init_state(config.build(), optax.identity(), mesh=mesh, strategy=mp.ddp(), key=0)
    conversations = [Conversation(np.arange(1, n), (np.arange(1, n) > 2).astype(np.int32)) for n in (5, 8, 4)]

    @jax.jit
    def losses(params, rows):
        with mp.use_rules(mesh, mp.ddp()):
            return next_token_loss(config.build().bind(params, {}), rows, None)[0]

    together = losses(state.params, packed(conversations, 16))
    separate = [losses(state.params, packed([x], 16)) for x in conversations]
    assert int(together.weight) == sum(x.is_answer[1:].sum() for x in conversations)
    np.testing.assert_allclose(together.total, sum(loss.total for loss in separate), rtol=1e-5)


def test_chat_data_rejects_bad_messages_and_options(tmp_path):
    template = Template(TEMPLATE, {}, where="template")
    for messages in (None, [], "text", ["x"], [{"content": "x"}], [{"role": "user", "contents": "x"}]):
        with raises("wrong-type", "line 1"):
            template.render("line 1", messages)
    for content, code in (
        (float("nan"), "wrong-type"),
        ([{"n": float("inf")}], "wrong-type"),
        ("\ud800", "bad-syntax"),
    ):
        for fields in ({"messages": [*CHATS[0], {"role": "user", "content": content}]},
                       {"messages": CHATS[0], "documents": [{"text": content}]}):  # fmt: skip
            with raises(code, "line 1") as error:
                template.render("line 1", **fields)
            assert error.value.requested == f"read its `{[*fields][-1]}`"
    for change, code, where in (
        ({"field": "message"}, "unknown-name", "line 1"),
        ({"template": None}, "missing-file", "folder"),
        ({"seq_len": float("nan")}, "not-an-int", "ChatData"),
        ({"tokenizer": None}, "wrong-type", "ChatData.tokenizer"),
        ({"stop_tokens": "<user>"}, "wrong-type", "ChatData.stop_tokens"),
        ({"files": (5,)}, "wrong-type", "ChatData.files"),
        ({"date": "today"}, "bad-syntax", "ChatData.date"),
        ({"seq_len": 3}, "out-of-range", "ChatData.files"),
    ):
        with raises(code, where):
            chats(tmp_path, **change).open(batch_size=2, seed=0)


FORGETS = """{%- set last = namespace(user=0) %}{%- for m in messages %}
{%- if m.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}{{- '[' + m.role + ']' }}
{%- if m.role == 'assistant' and loop.index0 > last.user %}
{{- '<think>' + m.reasoning_content | default('') + '</think>' }}{%- endif %}
{{- m.content + '.' }}{%- endfor %}{%- if add_generation_prompt %}{{- '[assistant]' }}{%- endif %}
"""  # omits the reasoning of earlier turns, and always writes a reasoning block for the last turn


def test_chat_rewritten_history_trains_each_answer_once():
    thinking = [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "B"},
        {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"},
        {"role": "tool", "content": "e"}, {"role": "assistant", "content": "f", "reasoning_content": "F"},
        {"role": "user", "content": "thanks"},
    ]  # fmt: skip
    rendered = Template(FORGETS, {}, where="template").render("line 1", thinking)
    assert [(text, [text[slice(*span)] for span in spans]) for text, spans in rendered] == [
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
    with raises("bad-syntax", "line 1"):
        Template(marking, {}, where="template").render("line 1", [{"role": "user", "content": "\ud800a\udfff"}])


def test_texts_of_a_conversation_are_in_the_same_set(tmp_path):
    data = chats(tmp_path, seq_len=192)
    plain = data.open(batch_size=2, seed=0).describe()
    (tmp_path / "template.jinja").write_text(FORGETS)
    source = data.open(batch_size=2, seed=0)
    info = source.describe()
    assert (plain["in_parts"], info["in_parts"]) == (0, 40)
    assert "40 conversations in parts" in data_line(info)
    assert "in parts" not in data_line(plain)
    assert [info[side]["conversations"] for side in ("train", "valid")] == [28, 12]
    questions = []
    for rows in source._packed:
        texts = [
            source.decode(rows["inputs"][row][rows["segments"][row] == segment])
            for row in range(len(rows["inputs"]))
            for segment in range(1, rows["segments"][row].max() + 1)
        ]
        questions.append({text.partition("é")[0] for text in texts})
        assert len(texts) == 2 * len(questions[-1])
    assert not questions[0] & questions[1]
    num_trained = sum(info[side]["learnt_tokens"] for side in ("train", "valid"))
    answers = [message["content"] for chat in CHATS for message in chat[1::2]]
    assert num_trained == sum(len(f"<think></think>{answer}.") for answer in answers)


def test_tojson_and_strftime_match_transformers():
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
RENDERED = "<user>q<assistant>y$\n"
CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "y"}]


def test_tools_and_documents_match_transformers():
    """The expected texts are from `apply_chat_template(tools=..., documents=...)` of transformers 5.24."""
    template, documents = Template(WITH_TOOLS, {}, where="template"), [{"title": "T", "text": "x é"}]
    schema = (
        '[{"type": "function", "function": {"name": "add", "description": "Sum <a> & é", "parameters": {"type": '
        '"object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a"]}}}]\n'
    )
    for extras, before in (
        ({}, ""), ({"tools": TOOLS}, schema), ({"tools": json.dumps(TOOLS)}, schema), ({"tools": []}, "[]\n"),
        ({"documents": documents}, "[T|x é]"), ({"tools": TOOLS, "documents": documents}, schema + "[T|x é]"),
    ):  # fmt: skip
        ((text, spans),) = template.render("line 1", CHAT, **extras)
        assert text == before + RENDERED
        assert [text[slice(*span)] for span in spans] == ["y$\n"]
    for tools in ("add", 3, [3], {"name": "add"}, '{"name": "add"}', "[" * 10_000):
        with raises("wrong-type", "line 1"):
            template.render("line 1", CHAT, tools=tools)


@pytest.mark.parametrize("kind", ["config", "files"])
def test_template_of_uses_the_tool_use_template(kind, tmp_path):
    named = {"default": TEMPLATE, "tool_use": "T{{ tools | length }}" + TEMPLATE}
    config = {"chat_template": [{"name": name, "template": source} for name, source in named.items()]}
    if kind == "config":
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    else:
        (tmp_path / "chat_template.jinja").write_text(named["default"])
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(named["tool_use"])
    template = Template.of(str(tmp_path), None)
    assert template.render("line 1", CHAT)[0].text == RENDERED
    assert template.render("line 1", CHAT, tools=TOOLS)[0].text == "T1" + RENDERED


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_records_render_tools_and_count_unused_fields(kind, tmp_path, caplog):
    records = [{"messages": chat, "tools": TOOLS, "id": number} for number, chat in enumerate(CHATS)]
    records[0]["source"], name = "web", f"records.{kind}"
    if kind == "parquet":  # structs have the fields of all records, with nulls
        other = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "strict": True}}}]
        records[1]["tools"] = other
        parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / name)
    else:
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    data = chats(tmp_path, files=(str(tmp_path / name),), seq_len=512)
    (tmp_path / "template.jinja").write_text(WITH_TOOLS)
    with caplog.at_level("WARNING"):
        source = data.open(batch_size=1, seed=0)
    # All rows of a table have all columns.
    assert source.describe()["unused_fields"] == {"id": 40, "source": 1 if kind == "jsonl" else 40}
    (line,) = [record.getMessage() for record in caplog.records]
    assert "these fields of the records are not used: `id` (40 records)" in line
    assert "nothing reads the fields id (40 records)" in data_line(source.describe())
    rows = source._packed[0]
    text = source.decode(rows["inputs"][0][rows["segments"][0] == 1])
    assert text.startswith(json.dumps(TOOLS, ensure_ascii=False) + "\n<user>q")
    (tmp_path / "template.jinja").write_text(TEMPLATE)  # does not read tools
    assert data.open(batch_size=1, seed=0).describe()["unused_fields"]["tools"] == 40


def test_reasoning_is_available_under_all_names():
    fields = ("reasoning_content", "thinking", "reasoning")
    for name in fields:
        source = f"{{% for m in messages %}}{{{{ m.{name} }}}}{{{{ m.content }}}}{{% endfor %}}"
        template = Template(source, {}, where="template")
        for field in fields:
            answer = {"role": "assistant", "content": "y", field: "why "}
            assert template.render("line 1", [CHAT[0], answer])[-1].text == "qwhy y"
    # Different fields remain available under their names. `reasoning_content` has the first non-empty field.
    answer = {"role": "assistant", "content": "y", "reasoning": "b", "thinking": "a", "reasoning_content": None}
    source = "{% for m in messages %}{{ m.thinking }}{{ m.reasoning }}{{ m.reasoning_content }}{% endfor %}"
    assert Template(source, {}, where="template").render("line 1", [answer])[-1].text == "aba"


def test_random_conversations_render_or_raise_full_errors():
    rng, template, num_rendered = random.Random(0), Template(TEMPLATE, {}, where="template"), 0
    values = [
        None, -1, 2**63, float("nan"), "", "\ud800", "{{ 1 }}", [], [[]], {}, {"role": "assistant"}, True, "9" * 99,
    ]  # fmt: skip
    for _ in range(300):
        chat = json.loads(json.dumps(rng.choice(CHATS)))
        message = rng.choice(chat)
        message[rng.choice([*message, "more"])] = rng.choice(values)
        try:
            template.render("line 1", rng.choice([chat, chat, chat, message, rng.choice(values)]))
            num_rendered += 1
        except mp.MeshparError as error:
            check_parts(error)
    assert 0 < num_rendered < 300


def test_parquet_with_the_template_of_a_folder(tmp_path):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<user>": 0, "[UNK]": 1, "x": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    table = pyarrow.table({"chat": [[{**message, "name": None} for message in chat] for chat in CHATS]})
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

def anonymous_bytes():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

def data(name):
    return ChatData(files=(name,), tokenizer="bytes", template="template.jinja", seq_len=1024)

data("few.jsonl").open(batch_size=1, seed=0)  # import everything before measuring
before, peak, done = anonymous_bytes(), 0, threading.Event()

def watch():
    global peak
    while not done.wait(0.01):
        peak = max(peak, anonymous_bytes() - before)

thread = threading.Thread(target=watch)
thread.start()
source = data("many.jsonl").open(batch_size=16, seed=0)
with source.train() as batches:
    next(batches), source.fingerprint, source.describe()
done.set()
thread.join()
print(peak)
"""


@pytest.mark.matrix
def test_many_conversations_need_little_memory(tmp_path):
    line = json.dumps({"messages": [{**message, "content": message["content"] * 200} for message in CHATS[0]]}) + "\n"
    for name, num_bytes in (("few", 20_000), ("many", 60_000_000)):
        (tmp_path / f"{name}.jsonl").write_text(line * (num_bytes // len(line)))
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    process = subprocess.run([sys.executable, "-c", MEASURED], cwd=tmp_path, capture_output=True, text=True, check=True)
    print(f"{int(process.stdout) / 1e6:.0f} MB")
    assert int(process.stdout) < 250_000_000  # the rows have 1.2 GB


@pytest.mark.matrix
def test_recipe_trains_on_conversations(tmp_path):
    recipe = load_recipe(RECIPE, devices=8).override("steps=2", "lora.rank=2", "step.accumulate=2", "batch_size=16")
    recipe = recipe.override("optimizer.warmup_steps=0", "sample.num_tokens=4")
    recipe = recipe.replace(data=chats(tmp_path, valid_batches=1, seq_len=24, valid_fraction=0.45))
    outcome = run(recipe, out=tmp_path, stream=io.StringIO())
    assert outcome.summary["validation"]["loss"] > 0
    written = json.loads((outcome.folder / "recipe.json").read_text())
    assert written["data"]["type"] == "ChatData"
    assert written["lora"]["rank"] == 2
