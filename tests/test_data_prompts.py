"""Prompts, their room in the context, the sample order, and the model's own files."""

from __future__ import annotations

import json
import logging

import pytest

from openrlhf_like.data import (
    Record,
    ResumableSampler,
    build_prompts,
    check_model_path,
    check_vocab,
    load_tokenizer,
    model_context,
    model_vocab_size,
    num_batches,
    prompt_budget,
    render_prompt,
)
from openrlhf_like.types import UserError
from tests.tiny import build_tokenizer

TOKENIZER = build_tokenizer()


def rows(*data: dict, source: str = "d") -> list[Record]:
    return [Record(d, source, i, f"{source}.jsonl:{i + 1}") for i, d in enumerate(data)]


def test_fault_21_equal_texts_are_different_prompts_with_their_own_labels():
    records = rows({"input": "same", "y": 1}, {"input": "same", "y": 2}) + rows({"input": "same", "y": 3}, source="e")
    prompts, stats = build_prompts(records, TOKENIZER, label_key="y")
    assert [p.prompt_id for p in prompts] == ["d:0", "d:1", "e:0"]
    assert [p.label for p in prompts] == [1, 2, 3]
    assert [p.datasource for p in prompts] == ["d", "d", "e"]
    assert len({p.text for p in prompts}) == 1 and stats.kept == 3


def test_fault_21_a_row_that_a_mixture_repeats_is_another_prompt():
    record = rows({"input": "x"})[0]
    prompts, _ = build_prompts([record, record, record], TOKENIZER)
    assert [p.prompt_id for p in prompts] == ["d:0", "d:0#2", "d:0#3"]


def test_a_prompt_carries_its_other_columns_and_its_datasource():
    prompts, _ = build_prompts(rows({"input": "x", "y": [1], "z": 2, "datasource": "gsm"}), TOKENIZER, label_key="y")
    assert prompts[0].metadata == {"z": 2, "datasource": "gsm"}
    assert prompts[0].datasource == "gsm" and prompts[0].label == [1]
    assert build_prompts(rows({"input": "x"}), TOKENIZER)[0][0].label == ""


@pytest.mark.parametrize("options", [{}, {"input_template": "Q: {}\nA: "}, {"apply_chat_template": True}])
def test_text_and_ids_agree_and_render_prompt_gives_the_same(options):
    prompt = build_prompts(rows({"input": "what {is}?"}), TOKENIZER, **options)[0][0]
    assert TOKENIZER.decode(prompt.token_ids) == prompt.text
    assert render_prompt("what {is}?", TOKENIZER, **options) == (prompt.text, prompt.token_ids)
    if "apply_chat_template" in options:
        assert prompt.text == "<|im_start|>user\nwhat {is}?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("max_len", [1, 7, 20])
@pytest.mark.parametrize("max_new", [None, 1, 5, 30])
@pytest.mark.parametrize("context", [None, 6, 50])
def test_fault_7_the_budget_never_passes_the_limit_and_the_filter_asks_it(max_len, max_new, context):
    limit = min(max_len, context or max_len)
    for length in range(1, 25):
        budget = prompt_budget(length, max_len, max_new, context)
        assert budget >= 0 and (budget == 0 or length + budget <= limit)
        if max_new is None:
            assert budget == max(limit - length, 0)
        else:
            assert budget == (max_new if length + max_new <= limit else 0)
        records = rows({"input": "x" * length}, {"input": "y"})
        keeps = [p.text[0] for p in _prompts_or_none(records, max_len, max_new, context)]
        assert ("x" in keeps) == (budget > 0)


def _prompts_or_none(records, max_len, max_new, context):
    try:
        return build_prompts(records, TOKENIZER, max_len=max_len, max_new_tokens=max_new, model_context=context)[0]
    except UserError as error:
        assert "too long" in str(error)
        return []


def test_fault_7_dropped_prompts_are_counted_with_one_warning(caplog):
    records = rows(*({"input": "x" * n} for n in (3, 5, 6, 9)))
    with caplog.at_level(logging.WARNING):
        prompts, stats = build_prompts(records, TOKENIZER, max_len=10, max_new_tokens=5)
    assert [p.prompt_id for p in prompts] == ["d:0", "d:1"]
    assert (stats.total, stats.kept, stats.dropped) == (4, 2, {"prompt_too_long": 2})
    assert len(caplog.records) == 1
    assert "2 of 4 prompts dropped as too long for --data.max_len 10 and --rollout.max_new_tokens 5" in caplog.text


@pytest.mark.parametrize(
    "data,options,message",
    [
        ({"text": "x"}, {}, r"d\.jsonl:1: no key 'input' \(--data\.input_key\)"),
        ({"input": ""}, {}, r"d\.jsonl:1: key 'input' .* is empty"),
        ({"input": 3}, {}, r"d\.jsonl:1: key 'input' .* got int"),
        ({"input": "x"}, {"label_key": "y"}, r"d\.jsonl:1: no key 'y' \(--data\.label_key\)"),
        ({"input": [{"role": "user", "content": "x"}]}, {}, r"d\.jsonl:1: .*--data\.apply_chat_template"),
        (
            {"input": [{"role": "assistant", "content": "x"}]},
            {"apply_chat_template": True},
            r"d\.jsonl:1: .*ends with an assistant message",
        ),
        ({"input": "x"}, {"input_template": "Question"}, r"--data\.input_template \"Question\": has no \{\}"),
    ],
)
def test_a_bad_prompt_record_is_refused(data, options, message):
    with pytest.raises(UserError, match=message):
        build_prompts(rows(data), TOKENIZER, **options)


def test_a_backslash_n_from_a_shell_is_warned_about(caplog):
    build_prompts(rows({"input": "x"}), TOKENIZER, input_template="User: {}\\nAssistant: ")
    assert "not a line break" in caplog.text


def test_fault_20_the_horizon_counts_the_incomplete_last_batch_of_each_epoch():
    assert num_batches(1000, 128, 3) == 24
    assert num_batches(1024, 128, 3) == 24
    assert num_batches(5, 8, 2) == 2
    sampler = ResumableSampler(1000, 128, seed=1, epochs=3)
    assert len(sampler) == 24 == sum(1 for _ in sampler)


@pytest.mark.parametrize("n,batch", [(10, 3), (9, 3), (2, 5), (1, 1)])
def test_every_sample_is_seen_once_an_epoch_and_epochs_differ(n, batch):
    sampler = ResumableSampler(n, batch, seed=7, epochs=4)
    batches = list(sampler)
    per_epoch = num_batches(n, batch)
    epochs = [sum(batches[e * per_epoch : (e + 1) * per_epoch], []) for e in range(4)]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    if n > 8:
        assert len({tuple(epoch) for epoch in epochs}) == 4
    assert list(ResumableSampler(n, batch, shuffle=False, epochs=1)) == [
        list(range(i, min(i + batch, n))) for i in range(0, n, batch)
    ]


@pytest.mark.parametrize("stop", range(12))
def test_fault_25_a_resumed_order_is_the_uninterrupted_one_mid_epoch_and_across(stop):
    full = list(ResumableSampler(10, 3, seed=5, epochs=3))
    first = ResumableSampler(10, 3, seed=5, epochs=3, fingerprint="f")
    stream = iter(first)
    head = [next(stream) for _ in range(stop)]
    state = json.loads(json.dumps(first.state_dict()))
    second = ResumableSampler(10, 3, seed=5, epochs=3, fingerprint="f")
    second.load_state_dict(state)
    assert len(second) == 12 - stop
    assert head + list(second) == full


def test_fault_25_resume_with_another_batch_size_keeps_the_order():
    first = ResumableSampler(10, 4, seed=5, epochs=1)
    head = next(iter(first))
    second = ResumableSampler(10, 3, seed=5, epochs=1)
    second.load_state_dict(first.state_dict())
    assert head + sum(second, []) == list(first.order(0))


@pytest.mark.parametrize(
    "other,message",
    [
        ({"n": 9}, "written on 10 samples, the data now has 9"),
        ({"fingerprint": "new"}, "the data changed since the checkpoint"),
        ({"seed": 6}, "with seed 5, now it is 6"),
        ({"shuffle": False}, "with shuffle True"),
    ],
)
def test_fault_25_changed_data_is_a_clear_error_on_resume(other, message):
    state = ResumableSampler(10, 3, seed=5, fingerprint="old").state_dict()
    now = {"n": 10, "batch_size": 3, "seed": 5, "fingerprint": "old", **other}
    with pytest.raises(UserError, match=f"--ckpt.load_enable.*{message}"):
        ResumableSampler(**now).load_state_dict(state)


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 258}}))
    assert model_vocab_size(str(tmp_path)) == 258
    with pytest.raises(UserError, match=r"--actor\.model_name_or_path .*258 entries, its tokenizer needs 259"):
        check_vocab(258, TOKENIZER, str(tmp_path), flag="--actor.model_name_or_path")
    check_vocab(259, TOKENIZER, "p")
    check_vocab(264, TOKENIZER, "p")
    check_vocab(None, TOKENIZER, "p")


def test_the_context_is_the_models_and_a_tokenizers_1e18_is_no_limit(tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.model_max_length = int(1e18)
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.model_max_length < 2**31
    assert model_context(str(tmp_path), loaded) is None
    assert model_context(str(tmp_path), TOKENIZER) == 1024
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 77, "vocab_size": 300}))
    assert model_context(str(tmp_path), loaded) == 77


def test_a_chat_template_may_be_given_as_text_or_as_a_file(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    template = "{% for m in messages %}#{{ m.content }}{% endfor %}"
    file = tmp_path / "t.jinja"
    file.write_text(template)
    for given in (template, str(file)):
        assert render_prompt("hi", load_tokenizer(str(tmp_path), chat_template=given), True)[0] == "#hi"
    with pytest.raises(UserError, match="--data.tokenizer_chat_template nosuch: neither"):
        load_tokenizer(str(tmp_path), chat_template="nosuch")


def test_a_path_without_tokenizer_and_a_tokenizer_without_eos_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"^--actor\.model_name_or_path .*no tokenizer can be loaded") as caught:
        load_tokenizer(str(tmp_path / "nothing"), flag="--actor.model_name_or_path")
    assert "\n" not in str(caught.value)
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="has no eos_token"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("path", [None, "", "./nothing", "/no/such", "a/b/c"])
def test_a_missing_model_path_is_refused_at_once(path):
    with pytest.raises(UserError, match=r"^--actor\.model_name_or_path.*: no "):
        check_model_path(path, "--actor.model_name_or_path")


def test_a_folder_without_config_is_refused_and_hub_names_pass(tmp_path):
    with pytest.raises(UserError, match="has no config.json"):
        check_model_path(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert check_model_path(str(tmp_path)) == str(tmp_path)
    assert check_model_path("owner/name") == "owner/name"
