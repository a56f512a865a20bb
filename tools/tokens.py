"""Count the size of Python code in tokens, the same on every Python version.

    python tools/tokens.py train_gpt.py sample.py        tokens, tokens a line of code, the longest functions
    python tools/tokens.py --json train_gpt.py

Names, operators, numbers and strings count, as `tokenize` sees them; comments, line ends and indentation do not. A
plain string is one token, and so is a docstring; an f-string is one token and the tokens of every expression inside it.
The limits in tests/test_house.py are in these tokens; those of scripts leave out the section `kernels`.
"""

import ast
import io
import json
import re
import sys
import textwrap
import tokenize

from endings import run_tool

SKIPPED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def fields_of(text: str) -> int:
    """Return the tokens of the expressions in an f-string, including nested format fields."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        return 0
    values = [node.value for node in ast.walk(tree) if isinstance(node, ast.FormattedValue)]
    return sum(count(ast.unparse(value)) for value in values)


def count_script(text: str) -> int:
    """Return the tokens of a script that the limits are about: without its section kernels."""
    before, _, rest = text.partition("# === shared: kernels ===\n")
    _, _, after = rest.partition("# === end: kernels ===\n")
    return count(before) + count(after)


def count(text: str) -> int:
    """Return the tokens of Python source."""
    total = 0
    inside = 0
    before = ""
    start = getattr(tokenize, "FSTRING_START", None)
    middle = {getattr(tokenize, "FSTRING_MIDDLE", None)}
    end = getattr(tokenize, "FSTRING_END", None)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in SKIPPED or token.type in middle:
            continue
        if start is not None and token.type == start:
            inside += 1
            total += 1
        elif end is not None and token.type == end:
            inside -= 1
        elif inside and (before == "!" or (token.type == tokenize.OP and token.string in "{}:!")):
            pass  # before == "!": the letter of a conversion, as in {x!r}
        else:
            total += 1
            if token.type == tokenize.STRING and re.match(r"(?i)[rb]*f", token.string):
                total += fields_of(token.string)
        before = token.string
    return total


def functions(text: str) -> list[tuple[int, str]]:
    """Return (tokens, name) of every function and class, the largest first."""
    lines = text.split("\n")
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])) + "\n"
            kind = "class " if isinstance(node, ast.ClassDef) else ""
            found.append((count(source), kind + node.name))
    return sorted(found, reverse=True)


def main() -> None:
    """Run the command line described at the top of this file."""
    paths = [argument for argument in sys.argv[1:] if argument != "--json"]
    result = {}
    for path in paths:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        code = sum(
            bool(line.strip()) and not line.strip().startswith("#") for line in text.split("\n")
        )
        tokens = count(text)
        longest = functions(text)
        result[path] = {"tokens": tokens, "bytes": len(text.encode()), "longest": longest[:12]}
        if "--json" not in sys.argv:
            shown = ", ".join(f"{name} {size}" for size, name in longest[:8])
            print(
                f"{path}: {tokens} tokens, {tokens / max(1, code):.1f} a line of code; longest: {shown}"
            )
    if "--json" in sys.argv:
        print(json.dumps(result))


if __name__ == "__main__":
    run_tool(main)
