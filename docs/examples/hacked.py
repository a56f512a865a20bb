"""Rewards for sorting, of which the third can be hacked; see docs/grpo_gspo.md.

REWARD=docs/examples/hacked.py:right,docs/examples/hacked.py:form:0.5,docs/examples/hacked.py:found
"""


def right(completions, answer):
    """1 for the right answer."""
    return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]


def form(completions):
    """1 if the text has only digits."""
    return [float(text.isdigit()) for text in completions]


def found(completions, answer):
    """Partial credit for characters of the right answer. Its fault: repetitions count again."""
    rewards = []
    for text, wanted in zip(completions, answer, strict=True):
        count = sum(character in wanted for character in text)
        rewards.append(count / len(wanted))
    return rewards
