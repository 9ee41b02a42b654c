"""Compiles a request's grammar to llguidance's form. Pure; called by the compile worker to check, by the executor to
use.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

from pdserve.config.groups import GrammarConfig
from pdserve.errors import GrammarError
from pdserve.grammar.bounds import check_grammar_text, check_pattern_size, check_schema
from pdserve.grammar.structural_tag import structural_tag_lark
from pdserve.grammar.vocabulary import Vocabulary
from pdserve.protocol.sampling import Grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_CHARS = 1 << 18
"""Longest text of a grammar in characters."""
SOME_WHITESPACE = r"\x20|\r?\n(\x20{0,40}|\t{0,10})"
"""Default white space between JSON tokens: a blank, or a line break and indentation. With an unbounded pattern a model
could generate white space forever.
"""


@dataclasses.dataclass(frozen=True)
class JsonRules:
    """Layout of generated JSON. `whitespace`: a pattern of the text allowed between JSON tokens; None: no white
    space.
    """

    whitespace: str | None = SOME_WHITESPACE

    @classmethod
    def of(cls, config: GrammarConfig) -> JsonRules:
        """Read the rules from the flags, which are mutually exclusive."""
        if config.constrained_json_disable_any_whitespace:
            return cls(None)
        if config.constrained_json_max_whitespace_cnt is not None:
            count = config.constrained_json_max_whitespace_cnt
            return cls(rf"[\x20\t\r\n]{{1,{count}}}" if count else None)
        return cls(config.constrained_json_whitespace_pattern or SOME_WHITESPACE)

    def options(self) -> JsonCompileOptions:
        """Return the rules as llguidance options."""
        if self.whitespace is None:
            return {"whitespace_flexible": False}
        return {"whitespace_pattern": self.whitespace}


def compile_grammar(grammar: Grammar, rules: JsonRules, vocabulary: Vocabulary) -> str:
    """Compile `grammar` to the source that `Matcher` takes. Quick: opening a matcher finds most errors of a grammar.

    Raises:
        GrammarError: the grammar is too large, or is not valid for its kind.
    """
    if len(grammar.text) > MAX_CHARS:
        raise GrammarError(f"it has {len(grammar.text)} characters; the maximum is {MAX_CHARS}")
    try:
        return _compile(grammar, rules, vocabulary)
    except GrammarError:
        raise
    except RecursionError as error:
        raise GrammarError("it is nested too deeply") from error
    except Exception as error:  # llguidance's converters raise exceptions of many kinds
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
                raise GrammarError(f"a JSON schema must be an object or true, got {json.dumps(schema)[:40]}")
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
        case "any_text":
            return LLMatcher.grammar_from_regex(r"(.|\n)*")
