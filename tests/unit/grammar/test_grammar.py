"""What requests bring as the engine's grammars: which texts follow them, and which grammars are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.config.groups import GrammarConfig
from pdserve.errors import GrammarError
from pdserve.grammar.compile import MAX_CHARS, JsonRules, compile_grammar
from pdserve.grammar.matcher import Matcher
from pdserve.grammar.vocabulary import Vocabulary
from pdserve.protocol.sampling import Grammar, GrammarKind
from tests.tiny import EOS_ID, VOCAB_SIZE, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
VOCABULARY = Vocabulary(TOKENIZER.backend_tokenizer.to_str(), VOCAB_SIZE, [EOS_ID])
RULES = JsonRules()
INTEGER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def follows(kind: GrammarKind, grammar: Any, text: str, rules: JsonRules = RULES) -> bool:
    """Whether `text` is all that `grammar` wants: it is accepted, and EOS may come."""
    written = grammar if isinstance(grammar, str) else json.dumps(grammar)
    matcher = Matcher(VOCABULARY, compile_grammar(Grammar(kind=kind, text=written), rules, VOCABULARY))
    try:
        matcher.accept(TOKENIZER.encode(text, add_special_tokens=False))
    except GrammarError:
        return False
    return bool(matcher.mask()[EOS_ID // 32] >> EOS_ID % 32 & 1)


@pytest.mark.parametrize(
    ("config", "good", "bad"),
    [
        (GrammarConfig(), ['{"a":1}', '{ "a": 1 }', '{\n    "a": 1\n}'], ['{  "a": 1}', '{"a":1} ', ' {"a":1}']),
        (GrammarConfig(constrained_json_disable_any_whitespace=True), ['{"a":1}'], ['{"a": 1}']),
        (GrammarConfig(constrained_json_max_whitespace_cnt=2), ['{"a":  1}', '{\n "a":1}'], ['{"a":   1}']),
        (GrammarConfig(constrained_json_max_whitespace_cnt=0), ['{"a":1}'], ['{"a": 1}']),
        (GrammarConfig(constrained_json_whitespace_pattern=r"\t"), ['{"a":\t1}'], ['{"a": 1}']),
    ],
)
def test_whitespace_of_json_is_bounded(config: GrammarConfig, good: list[str], bad: list[str]) -> None:
    rules = JsonRules.of(config)
    assert [text for text in good if not follows("json_schema", INTEGER, text, rules)] == []
    assert [text for text in bad if follows("json_schema", INTEGER, text, rules)] == []


def test_the_keys_come_in_the_order_of_the_schema() -> None:
    schema = {"type": "object", "properties": {"b": {"const": 1}, "a": {"const": 2}}, "required": ["a", "b"]}
    assert follows("json_schema", schema, '{"b":1,"a":2}')
    assert not follows("json_schema", schema, '{"a":2,"b":1}')


def test_a_schema_may_refer_to_itself() -> None:
    tree = {"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}
    assert follows("json_schema", tree, "[[],[[]]]")


TAGS = {
    "structures": [
        {"begin": "<f=1>", "schema": INTEGER, "end": "</f>"},
        {"begin": "<f=2>", "schema": {"const": 5}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}
SEQUENCE = {
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "go "},
            {"type": "tag", "begin": "[", "content": {"type": "regex", "pattern": "a/b+"}, "end": ["]", ")"]},
            {
                "type": "or",
                "elements": [{"type": "const_string", "value": "1"}, {"type": "json_schema", "json_schema": {}}],
            },
        ],
    }
}
LIST = {
    "format": {
        "type": "tags_with_separator",
        "separator": ",",
        "tags": [{"begin": "<", "content": {"type": "regex", "pattern": "[0-9]"}, "end": ">"}],
        "at_least_one": True,
    }
}
ONCE = {
    "format": {
        "type": "triggered_tags",
        "triggers": ["</think>"],
        "tags": [{"begin": "</think>", "content": {"type": "json_schema", "json_schema": INTEGER}, "end": ""}],
        "at_least_one": True,
        "stop_after_first": True,
    }
}


@pytest.mark.parametrize(
    ("tag", "good", "bad"),
    [
        (TAGS, ["free text", 'x <f=1>{"a":3}</f> y <f=2>5</f>', ""], ["<f=3>", "<f=2>6</f>", '<f=1>{"a":3}']),
        (SEQUENCE, ["go [a/bb]1", "go [a/b)[true]"], ["go ", "go [a/b}1", "stop"]),
        (LIST, ["<1>", "<1>,<2>"], ["", "<1>,", "<a>"]),
        (ONCE, ['hm</think>{"a":1}', '</think>{"a": 1}'], ["hm", '{"a":1}', 'hm</think>{"a":1} more']),
    ],
)
def test_structural_tags(tag: dict[str, Any], good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not follows("structural_tag", tag, text)] == []
    assert [text for text in bad if follows("structural_tag", tag, text)] == []


def test_a_trigger_may_be_a_special_token() -> None:
    assert VOCABULARY.special_token("<bos>") is not None and VOCABULARY.special_token("<x>") is None
    tag = {"structures": [{"begin": "<bos>", "schema": INTEGER, "end": ""}], "triggers": ["<bos>"]}
    assert follows("structural_tag", tag, 'x<bos>{"a":1}')
    assert not follows("structural_tag", tag, "x<bos>y")


def test_gbnf_and_lark_are_both_taken() -> None:
    assert follows("ebnf", 'root ::= "a" | "b" root', "bba")
    assert follows("ebnf", 'start: "a" | "b" start', "bba")


@pytest.mark.parametrize(
    ("kind", "grammar", "says"),
    [
        ("regex", "(", "unclosed"),
        ("regex", "(?=a)", "look-around"),
        ("regex", "(" * 200, "nested deeper"),
        ("regex", "a" * (MAX_CHARS + 1), "characters"),
        ("ebnf", "root ::= missing", "missing"),
        ("ebnf", "nonsense", "::="),
        ("ebnf", "root ::= " + "(" * 200, "nested deeper"),
        ("json_schema", "{", "property name"),
        ("json_schema", "false", "object"),
        ("json_schema", '{"type": "nonsense"}', "nonsense"),
        ("json_schema", '{"not": {}}', "not"),
        ("json_schema", '{"$ref": "http://localhost/x"}', "localhost"),
        ("json_schema", "[" * 100_000, "nested"),
        ("json_schema", '{"allOf":' * 200 + "{}" + "}" * 200, "nested deeper"),
        ("structural_tag", "5", "object"),
        ("structural_tag", '{"type": "other"}', "type"),
        ("structural_tag", '{"triggers": ["a"], "structures": []}', "structures"),
        (
            "structural_tag",
            '{"triggers": ["a"], "structures": [{"begin": "b", "schema": {}}]}',
            "begins with the trigger",
        ),
        ("structural_tag", '{"format": {"type": "magic"}}', "format.type"),
        ("structural_tag", '{"format": {"type": "regex", "pattern": "' + "(" * 100 + '"}}', "nested"),
    ],
)
def test_what_is_refused_and_why(kind: GrammarKind, grammar: str, says: str) -> None:
    with pytest.raises(GrammarError, match=says.replace("(", r"\(")):
        Matcher(VOCABULARY, compile_grammar(Grammar(kind=kind, text=grammar), RULES, VOCABULARY))


def test_a_model_without_eos_or_with_another_tokenizer_has_no_grammars() -> None:
    with pytest.raises(GrammarError, match="EOS"):
        Vocabulary(TOKENIZER.backend_tokenizer.to_str(), VOCAB_SIZE, [])
    with pytest.raises(GrammarError, match="tokenizer"):
        Vocabulary("{}", VOCAB_SIZE, [EOS_ID])


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE + 100, VOCAB_SIZE - 1])
def test_logits_may_be_wider_or_narrower_than_the_tokenizer(vocab_size: int) -> None:
    vocabulary = Vocabulary(TOKENIZER.backend_tokenizer.to_str(), vocab_size, [EOS_ID])
    mask = Matcher(vocabulary, compile_grammar(Grammar(kind="regex", text="(.|\n)*"), RULES, vocabulary)).mask()
    assert len(mask) == vocabulary.num_mask_words >= vocab_size // 32
    padding = range(VOCAB_SIZE, 32 * len(mask))
    assert not any(mask[token // 32] >> token % 32 & 1 for token in padding)
