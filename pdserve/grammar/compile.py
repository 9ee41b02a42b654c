"""From a request's grammar to the engine's form. Pure; the compile worker calls it to check, the executor to obey."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

from pdserve.config.groups import GrammarConfig
from pdserve.errors import GrammarError
from pdserve.grammar.bounds import check_grammar_text, check_pattern_size, check_schema
from pdserve.grammar.structural_tag import structural_tag_lark
from pdserve.grammar.vocabulary import Vocabulary
from pdserve.protocol.failure import Grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_CHARS = 1 << 18
"""Longest text of a grammar."""
SOME_WHITESPACE = r"\x20|\r?\n(\x20{0,40}|\t{0,10})"
"""Between the tokens of JSON: a blank, or a line break and indentation. More would let a model write it for ever."""


@dataclasses.dataclass(frozen=True)
class JsonRules:
    """How JSON may be laid out. `whitespace`: a pattern of what may stand between its tokens; None: nothing may."""

    whitespace: str | None = SOME_WHITESPACE

    @classmethod
    def of(cls, config: GrammarConfig) -> JsonRules:
        """What the flags say; they exclude each other."""
        if config.constrained_json_disable_any_whitespace:
            return cls(None)
        if config.constrained_json_max_whitespace_cnt is not None:
            count = config.constrained_json_max_whitespace_cnt
            return cls(rf"[\x20\t\r\n]{{1,{count}}}" if count else None)
        return cls(config.constrained_json_whitespace_pattern or SOME_WHITESPACE)

    def options(self) -> JsonCompileOptions:
        """The engine's names for them."""
        if self.whitespace is None:
            return {"whitespace_flexible": False}
        return {"whitespace_pattern": self.whitespace}


def compile_grammar(grammar: Grammar, rules: JsonRules, vocabulary: Vocabulary) -> str:
    """What `Matcher` takes. Quick: most of what may be wrong with a grammar is found by opening a matcher.

    Raises:
        GrammarError: the grammar is too large, or is not of its kind.
    """
    if len(grammar.text) > MAX_CHARS:
        raise GrammarError(f"it has {len(grammar.text)} characters, at most {MAX_CHARS} are taken")
    try:
        return _compile(grammar, rules, vocabulary)
    except GrammarError:
        raise
    except RecursionError as error:
        raise GrammarError("it is nested too deeply") from error
    except Exception as error:  # the engine's converters raise plain exceptions of many kinds
        raise GrammarError(str(error)) from error


def _compile(grammar: Grammar, rules: JsonRules, vocabulary: Vocabulary) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    match grammar.kind:
        case "json_schema":
            schema = json.loads(grammar.text)
            check_schema(schema)
            schema = {} if schema is True else schema
            if not isinstance(schema, dict):
                raise GrammarError(f"a JSON schema that something follows is an object, got {json.dumps(schema)[:40]}")
            return LLMatcher.grammar_from_json_schema(schema, rules.options())
        case "regex":
            check_pattern_size(grammar.text)
            return LLMatcher.grammar_from_regex(grammar.text)
        case "ebnf":
            check_grammar_text(grammar.text)
            return LLMatcher.grammar_from_lark(any_to_lark(grammar.text))
        case "structural_tag":
            lark = structural_tag_lark(json.loads(grammar.text), rules.options(), vocabulary)
            return LLMatcher.grammar_from_lark(lark)
