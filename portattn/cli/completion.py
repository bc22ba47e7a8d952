"""Completion in bash, which takes `cuda:sm_90` and `triton==3.6.0` for several words."""

from __future__ import annotations

import os

from click.shell_completion import BashComplete, CompletionItem, add_completion_class, split_arg_string

BREAKS = ":="  # of COMP_WORDBREAKS, those that our values hold


class Bash(BashComplete):
    """Puts words together again that bash broke, and answers with what comes behind the last break."""

    _before = 0  # characters of each answer that bash leaves as they stand

    def get_completion_args(self) -> tuple[list[str], str]:
        words, at = split_arg_string(os.environ["COMP_WORDS"]), int(os.environ["COMP_CWORD"])
        whole: list[str] = []
        broken = False
        for word in words[: at + 1]:
            is_break = not word.strip(BREAKS)
            if whole and (is_break or broken):
                whole[-1] += word
            else:
                whole.append(word)
            broken = is_break
        typed = whole.pop() if at < len(words) else ""
        value = typed.partition("=")[2] if typed.startswith("-") else typed
        self._before = max(map(value.rfind, BREAKS)) + 1
        return whole[1:], typed

    def format_completion(self, item: CompletionItem) -> str:
        return f"{item.type},{item.value[self._before :]}"


def register() -> None:
    add_completion_class(Bash)
