"""Supervised examples: which ids are fed, and which are labels, over several kinds of chat template."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from openrlhf_like.data import Record, SFTOptions, build_prompts, build_sft_examples, load_tokenizer
from openrlhf_like.types import UserError
from tests.tiny import CHAT_TEMPLATE, build_tokenizer

# Writes its own BOS (Llama-3 style headers).
BOS_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}<|h|>\n\n{{ m['content'] | trim }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant<|h|>\n\n{% endif %}"
)
# Drops the <think> text of every assistant turn before the last user turn; the last gets an empty block if it has none.
THINK_TEMPLATE = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% set answer = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% if loop.index0 > ns.last %}{% if '</think>' in m.content %}"
    "{{ m.content.split('</think>')[0] }}</think>\n\n{{ answer }}{% else %}<think>\n\n</think>\n\n{{ answer }}"
    "{% endif %}"
    "{% else %}{{ answer }}{% endif %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The same dropping in every turn, and a generation prompt that opens the block (R1 style): no rendering of a prefix
# is a prefix of the final one.
OPEN_THINK_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<A>{{ m.content.split('</think>')[-1] }}{{ eos_token }}"
    "{% else %}<U>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<A><think>\n{% endif %}"
)
# Llama-2 style: no header for the assistant, a blank on each side of its text.
INST_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content | trim }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }} {{ eos_token }}{% else %}"
    "{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
# Says itself what the assistant produces, and leaves the end token and a newline outside.
GENERATION_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Marks turns with another token than the tokenizer's end token, and closes the conversation with that (Phi style).
TWO_MARKS_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
# Closes a turn only when something follows it.
LATE_MARKS_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if not loop.last or add_generation_prompt %}"
    "<|end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# No marks at all.
PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: "
    "{% endif %}"
)

TALK = [
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "<think>\nhidden one\n</think>\n\nfirst answer"},
    {"role": "user", "content": "first answer?"},
    {"role": "assistant", "content": "<think>\nhidden two\n</think>\n\nsecond"},
]


def tokenizer_of(template: str = CHAT_TEMPLATE, bos: bool = False):
    return build_tokenizer(chat_template=template, bos=bos)


def record(where: str = "file.jsonl:1", **data) -> Record:
    return Record(data, "file", 0, where)


def build_one(tokenizer, data: dict, **options):
    examples, _ = build_sft_examples([record(**data)], tokenizer, SFTOptions(**options))
    return examples[0]


def trained_runs(tokenizer, example) -> list[str]:
    """Decoded text of each unbroken run of labels."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], example.loss_mask, [0]])))
    return [tokenizer.decode(example.input_ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


FULL_1 = "<think>\nhidden one\n</think>\n\nfirst answer"
FULL_2 = "<think>\nhidden two\n</think>\n\nsecond"
MULTITURN_CASES = [
    ("chatml", CHAT_TEMPLATE, False, [FULL_1 + "<|im_end|>", FULL_2 + "<|im_end|>"]),
    ("writes_bos", BOS_TEMPLATE, True, [FULL_1 + "<|im_end|>", FULL_2 + "<|im_end|>"]),
    ("drops_think", THINK_TEMPLATE, False, ["first answer<|im_end|>", FULL_2 + "<|im_end|>"]),
    ("opens_think", OPEN_THINK_TEMPLATE, False, ["\n\nfirst answer<|im_end|>", "\n\nsecond<|im_end|>"]),
    ("inst", INST_TEMPLATE, True, [f" {FULL_1} <|im_end|>", f" {FULL_2} <|im_end|>"]),
    ("generation", GENERATION_TEMPLATE, False, [FULL_1 + "<|im_end|>", FULL_2 + "<|im_end|>"]),
    ("two_marks", TWO_MARKS_TEMPLATE, False, [FULL_1 + "<|end|>", FULL_2 + "<|end|>\n<|im_end|>"]),
    ("late_marks", LATE_MARKS_TEMPLATE, False, [FULL_1 + "<|end|>", FULL_2 + "<|im_end|>"]),
    ("plain", PLAIN_TEMPLATE, False, [FULL_1, FULL_2 + "<|im_end|>"]),
]


@pytest.mark.parametrize("name,template,bos,expected", MULTITURN_CASES, ids=[c[0] for c in MULTITURN_CASES])
def test_fault_2_labels_decode_to_the_assistants_text_of_the_final_rendering(name, template, bos, expected):
    tokenizer = tokenizer_of(template, bos)
    example = build_one(tokenizer, {"input": TALK}, apply_chat_template=True, multiturn=True)
    assert trained_runs(tokenizer, example) == expected
    rendering = tokenizer.apply_chat_template(TALK, tokenize=False)
    text = tokenizer.decode(example.input_ids)
    # What is fed is the final rendering itself, up to the end of the last turn.
    assert rendering.startswith(text) or text == rendering.rstrip() + tokenizer.eos_token
    assert rendering[len(text) :].strip() == ""


def test_fault_2_an_answer_that_repeats_the_users_text_and_the_markup_is_still_found():
    tricky = [
        {"role": "system", "content": "x"},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "x\nassistant\nx"},
        {"role": "assistant", "content": "assistant\nx\n"},
        {"role": "user", "content": "x"},
    ]
    tokenizer = tokenizer_of()
    example = build_one(tokenizer, {"input": tricky}, apply_chat_template=True, multiturn=True)
    assert trained_runs(tokenizer, example) == ["x<|im_end|>", "assistant\nx\n<|im_end|>"]


def test_fault_2_fixed_text_between_header_and_answer_is_the_models_to_produce():
    """An empty <think> block that the template writes is not in the generation prompt, so it is trained."""
    tokenizer = tokenizer_of(THINK_TEMPLATE)
    example = build_one(tokenizer, {"input": "q", "output": "a"}, output_key="output", apply_chat_template=True)
    assert trained_runs(tokenizer, example) == ["<think>\n\n</think>\n\na<|im_end|>"]


def test_tool_calls_of_a_turn_are_trained_and_tool_results_are_not():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        "<call>{{ c.name }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    talk = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "search"}]},
        {"role": "tool", "content": "found"},
        {"role": "assistant", "content": "done"},
    ]
    tokenizer = tokenizer_of(template)
    example = build_one(tokenizer, {"input": talk}, apply_chat_template=True, multiturn=True)
    assert trained_runs(tokenizer, example) == ["<call>search</call><|im_end|>", "done<|im_end|>"]


@pytest.mark.parametrize("name,template,bos,expected", MULTITURN_CASES, ids=[c[0] for c in MULTITURN_CASES])
def test_without_multiturn_only_the_last_assistant_turn_is_trained(name, template, bos, expected):
    tokenizer = tokenizer_of(template, bos)
    example = build_one(tokenizer, {"input": TALK}, apply_chat_template=True)
    assert trained_runs(tokenizer, example) == expected[-1:]
    split = build_one(
        tokenizer, {"input": TALK[:-1], "output": TALK[-1]["content"]}, apply_chat_template=True, output_key="output"
    )
    assert split.input_ids.tolist() == example.input_ids.tolist()
    assert split.loss_mask.tolist() == example.loss_mask.tolist()


@pytest.mark.parametrize("template,bos", [(BOS_TEMPLATE, True), (INST_TEMPLATE, True)], ids=["writes_bos", "inst"])
def test_fault_3_one_bos_and_one_terminator_from_a_template_that_writes_them(template, bos):
    tokenizer = tokenizer_of(template, bos)
    _add_bos_by_itself(tokenizer)
    example = build_one(tokenizer, {"input": "q", "output": "a"}, output_key="output", apply_chat_template=True)
    ids = example.input_ids.tolist()
    assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id
    assert ids[-1] == tokenizer.eos_token_id and ids[-2] != tokenizer.eos_token_id
    prompts, _ = build_prompts([record(input="q")], tokenizer, apply_chat_template=True)
    assert prompts[0].token_ids.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("template", ["User: {} Assistant: ", "<|endoftext|>{}"])
def test_fault_3_plain_text_gets_the_tokenizers_own_bos_once(template):
    tokenizer = tokenizer_of(bos=True)
    _add_bos_by_itself(tokenizer)
    for answer in ("a", "a<|im_end|>"):
        example = build_one(tokenizer, {"input": "q", "output": answer}, output_key="output", input_template=template)
        ids = example.input_ids.tolist()
        assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1
        assert ids[-1] == tokenizer.eos_token_id and ids.count(tokenizer.eos_token_id) == 1


def test_plain_text_gets_no_bos_from_a_tokenizer_that_adds_none():
    tokenizer = tokenizer_of(bos=True)
    example = build_one(tokenizer, {"input": "q", "output": "a"}, output_key="output")
    assert tokenizer.bos_token_id not in example.input_ids


def _add_bos_by_itself(tokenizer) -> None:
    from tokenizers import processors

    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id


def test_fault_4_pad_equals_eos_and_the_true_end_token_is_a_label(tmp_path):
    """Loaded without a pad token: pad becomes eos, and the mask, not the id, decides what is trained."""
    built = tokenizer_of()
    built.pad_token = None
    built.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}] * 2
    example = build_one(tokenizer, {"input": talk}, apply_chat_template=True, multiturn=True)
    ends = np.flatnonzero(example.input_ids == tokenizer.eos_token_id)
    # user, assistant, user, assistant: the assistant's ends are labels, the user's are not.
    assert example.loss_mask[ends].tolist() == [0, 1, 0, 1]


def test_fault_5_the_prompts_ids_do_not_depend_on_the_answer():
    """With merges over the boundary: '>' + 'a' and ' ' + 'b' are tokens when text is tokenized as one."""
    tokenizer = build_tokenizer(merges=[(">", "a"), ("Ġ", "b"), ("Ċ", "c")])
    assert len(tokenizer.tokenize(">a")) == 1
    for template in ("Q{} ->", "Q{} ", "Q{}\n"):
        rows = [record(input="q", output=answer) for answer in ("a", "b", "c", "xyz")]
        options = SFTOptions(output_key="output", input_template=template)
        examples, _ = build_sft_examples(rows, tokenizer, options)
        prompt = build_prompts(rows[:1], tokenizer, input_template=template)[0][0].token_ids
        for example, row in zip(examples, rows, strict=True):
            assert example.input_ids[example.loss_mask == 0].tolist() == prompt
            assert trained_runs(tokenizer, example) == [row.data["output"] + "<|im_end|>"]


@pytest.mark.parametrize(
    "template", [c[1] for c in MULTITURN_CASES if c[0] != "opens_think"], ids=lambda t: str(len(t))
)
def test_fault_5_sft_and_rl_see_the_same_prompt_ids(template):
    tokenizer = tokenizer_of(template, bos=True)
    rows = [record(input="what?", output="that")]
    examples, _ = build_sft_examples(rows, tokenizer, SFTOptions(output_key="output", apply_chat_template=True))
    prompts, _ = build_prompts(rows, tokenizer, apply_chat_template=True)
    ids, mask = examples[0].input_ids, examples[0].loss_mask
    assert ids[mask == 0].tolist() == prompts[0].token_ids


@pytest.mark.parametrize("scheme", ["metaspace_always", "metaspace_first", "prepend_normalizer"])
def test_fault_5_no_space_is_put_before_an_answer_by_a_sentencepiece_tokenizer(scheme):
    tokenizer = _sentencepiece_like(scheme)
    example = build_one(
        tokenizer, {"input": "ask me", "output": "go on"}, output_key="output", input_template="say({})="
    )
    assert tokenizer.convert_ids_to_tokens(example.input_ids[example.loss_mask == 1].tolist()) == [
        *"go", "▁", *"on", "</s>"
    ]  # fmt: skip
    prompts, _ = build_prompts([record(input="ask me")], tokenizer, input_template="say({})=")
    assert example.input_ids[example.loss_mask == 0].tolist() == prompts[0].token_ids
    assert tokenizer.decode(example.input_ids) == "say(ask me)=go on</s>"


def _sentencepiece_like(scheme: str):
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {c: i for i, c in enumerate("▁\nabcdefghijklmnopqrstuvwxyz()=?<>/")}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    if scheme == "prepend_normalizer":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    else:
        kind = scheme.split("_")[1]
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
        backend.decoder = decoders.Metaspace(prepend_scheme=kind)
    backend.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", clean_up_tokenization_spaces=False)


def test_fault_6_a_record_without_a_label_left_is_dropped_and_counted_with_one_warning(caplog):
    tokenizer = tokenizer_of()
    rows = [record(input="p" * n, output="answer") for n in (5, 20, 21, 30, 19)]
    with caplog.at_level(logging.WARNING):
        examples, stats = build_sft_examples(rows, tokenizer, SFTOptions(max_len=20, output_key="output"))
    # 5 + 6 + end fits; 19 keeps one token of the answer; 20, 21 and 30 keep none.
    assert (stats.total, stats.kept, stats.num_dropped, stats.truncated) == (5, 2, 3, 1)
    assert [e.num_labels for e in examples] == [7, 1]
    assert all(len(e) <= 20 for e in examples)
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == [
        "3 of 5 records dropped: --data.max_len 20 leaves no token of the answer"
    ]
    assert (stats.tokens, stats.label_tokens) == (12 + 20, 8)


def test_fault_6_all_records_dropped_is_refused():
    with pytest.raises(UserError, match=r"--data.max_len 4: all 1 records were dropped"):
        build_one(tokenizer_of(), {"input": "long prompt", "output": "a"}, output_key="output", max_len=4)


def test_a_cut_answer_gets_no_end_token():
    tokenizer = tokenizer_of()
    example = build_one(tokenizer, {"input": "p", "output": "abcdef"}, output_key="output", max_len=4)
    assert tokenizer.decode(example.input_ids) == "pabc" and example.loss_mask.tolist() == [0, 1, 1, 1]


def test_pretrain_mode_trains_every_token_but_the_first_and_adds_nothing():
    tokenizer = tokenizer_of()
    data = {"input": "some text", "output": "unused"}
    example = build_one(tokenizer, data, pretrain_mode=True, input_template="User: {}", output_key="output")
    assert tokenizer.decode(example.input_ids) == "some text"
    assert example.loss_mask.tolist() == [0] + [1] * 8


def test_without_output_key_the_whole_text_is_trained_with_its_end():
    tokenizer = tokenizer_of(bos=True)
    _add_bos_by_itself(tokenizer)
    example = build_one(tokenizer, {"input": "some text"}, input_template="User: {}")
    assert tokenizer.decode(example.input_ids) == "<|endoftext|>some text<|im_end|>"
    assert example.loss_mask.tolist() == [0] + [1] * 10


def test_arrays_are_int32_and_int8():
    example = build_one(tokenizer_of(), {"input": "q", "output": "a"}, output_key="output")
    assert example.input_ids.dtype == np.int32 and example.loss_mask.dtype == np.int8


CHAT = {"apply_chat_template": True}
PAIR = {"output_key": "output"}
BAD_RECORDS = [
    ({"text": "q", "output": "a"}, PAIR, r"f\.jsonl:7: no key 'input' \(--data\.input_key\).*has: text, output"),
    ({"input": "q"}, PAIR, r"f\.jsonl:7: no key 'output' \(--data\.output_key\)"),
    ({"input": "q", "output": 3}, PAIR, r"f\.jsonl:7: key 'output' .* must be text, got int"),
    ({"input": None, "output": "a"}, PAIR, r"f\.jsonl:7: key 'input' .* is null"),
    ({"input": "q", "output": " \n"}, PAIR, r"f\.jsonl:7: key 'output' .* is empty"),
    ({"input": TALK, "output": "a"}, PAIR, r"f\.jsonl:7: key 'input' .*add --data\.apply_chat_template"),
    ({"input": []}, CHAT, r"f\.jsonl:7: key 'input' .* empty list"),
    ({"input": 5}, CHAT, r"f\.jsonl:7: key 'input' .* got int"),
    ({"input": ["x"]}, CHAT, r"f\.jsonl:7: key 'input'\[0\] .* must be a message"),
    ({"input": [{"from": "human"}]}, CHAT, r"f\.jsonl:7: key 'input'\[0\] .* has no role"),
    ({"input": [{"role": "user"}]}, CHAT, r"f\.jsonl:7: key 'input'\[0\] .* no text in content"),
    ({"input": [*TALK[:1], {"role": "assistant", "content": ""}]}, CHAT, r"f\.jsonl:7: key 'input'\[1\].* is empty"),
    ({"input": TALK[:1]}, CHAT, r"f\.jsonl:7: key 'input': the conversation has no assistant turn"),
    ({"input": TALK[:3]}, CHAT, r"f\.jsonl:7: key 'input': the last message must be the assistant's"),
]


@pytest.mark.parametrize("data,options,message", BAD_RECORDS, ids=range(len(BAD_RECORDS)))
def test_a_bad_record_is_refused_with_file_line_and_key_in_one_line(data, options, message):
    with pytest.raises(UserError, match=message) as caught:
        build_sft_examples([record("f.jsonl:7", **data)], tokenizer_of(), SFTOptions(**options))
    assert "\n" not in str(caught.value)


def test_a_template_that_refuses_the_messages_names_the_record():
    talk = [{"role": "system", "content": "s"}, *TALK]
    with pytest.raises(UserError, match=r"f\.jsonl:7: key 'input' .*only user and assistant"):
        build_sft_examples(
            [record("f.jsonl:7", input=talk)], tokenizer_of(INST_TEMPLATE, True), SFTOptions(apply_chat_template=True)
        )


@pytest.mark.parametrize(
    "options,message",
    [
        ({"multiturn": True}, r"--data\.multiturn: needs --data\.apply_chat_template"),
        ({"output_key": "output", "input_template": "User: "}, r"--data\.input_template \"User: \": has no \{\}"),
        ({"output_key": "output", "input_template": "{x} {}"}, r"--data\.input_template .* one plain \{\}"),
        ({"output_key": "output", "input_template": "{} {"}, r"--data\.input_template"),
    ],
)
def test_contradicting_options_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        build_one(tokenizer_of(), {"input": "q", "output": "a"}, **options)


def test_a_tokenizer_without_chat_template_is_refused():
    tokenizer = tokenizer_of()
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="--data.tokenizer_chat_template"):
        build_one(tokenizer, {"input": TALK}, apply_chat_template=True)


@pytest.mark.parametrize(
    "output",
    ["a", {"role": "assistant", "content": "a"}, [{"role": "assistant", "content": "a"}]],
    ids=lambda o: str(o),
)
@pytest.mark.parametrize("multiturn", [False, True])
def test_the_output_may_be_text_a_message_or_messages(output, multiturn):
    tokenizer = tokenizer_of()
    data = {"input": [{"role": "user", "content": "q"}], "output": output}
    example = build_one(tokenizer, data, output_key="output", apply_chat_template=True, multiturn=multiturn)
    assert trained_runs(tokenizer, example) == ["a<|im_end|>"]
    assert data["input"] == [{"role": "user", "content": "q"}]
