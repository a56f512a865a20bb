"""The rules of the house, held over every script: fences, sizes, imports without effects, settings,
docs, paths.
"""

import ast
import functools
import io
import itertools
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

from conftest import load_tool

ROOT = Path(__file__).resolve().parents[1]
LINES_PER_CONFIG, COLUMNS = 15, 120
# Tokens at most, as tools/tokens.py counts them. These limits are lifted while published models, rows
# and rewards as users write them are made to work; the changes after that set them anew.
TOKENS = {
    "train_gpt.py": 31_500,
    "train_sft.py": 39_500,
    "train_dpo.py": 39_500,
    "train_ppo.py": 46_500,
    "train_grpo.py": 47_500,
    "train_gspo.py": 47_500,
    "quantize.py": 23_000,
    "convert.py": 24_000,
    "sample.py": 32_500,
}
POLICIES = ["train_grpo.py", "train_gspo.py", "train_ppo.py"]
TOKENS_OF_KERNELS, TOKENS_OF_MODEL = 1_500, 8_000
TOKENS_OF_MAIN, TOKENS_PER_FUNCTION, TOKENS_PER_CLASS = 2_000, 500, 2_000
CALLED = ("forward", "backward", "train", "train_step")  # by PyTorch, or in programs
SETTINGS, OTHER_SETTINGS = 60, 62
TOKENS_PER_PAGE = 3_000

sync, tokens = load_tool("sync"), load_tool("tokens")

# Every script of the house: those at the top (the smoke test is a test), the data scripts, the
# tools.
NAMES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.py", "data/*.py", "tools/**/*.py")
    for path in ROOT.glob(pattern)
    if not path.name.startswith("test_")
)
scripts = pytest.mark.parametrize("name", NAMES)
TOOLS = [name for name in NAMES if name.startswith("tools/")]


def tracked():
    """Files that git tracks or would track: what stands in .gitignore is left out."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return sorted({ROOT / name for name in listed.split("\0") if (ROOT / name).is_file()})


parse = functools.cache(ast.parse)


@functools.cache
def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_fenced_sections_are_equal_and_in_order():
    different = sync.differences(sync.load(ROOT))
    assert not different, "\n".join(different)


@pytest.mark.parametrize("name", TOKENS)
def test_script_sizes(name):
    """Section kernels, the same in every script that has it, is counted by itself."""
    text = text_of(name)
    size = tokens.count_script(text)
    assert size <= TOKENS[name] and tokens.count(text) - size <= TOKENS_OF_KERNELS
    section = sync.parse(text, name)["model"]
    assert 4_000 < tokens.count("".join(section.body)) <= TOKENS_OF_MODEL


def test_tokens_are_counted():
    source = 'def f(x):\n    """Doc."""\n    # a comment\n'
    source += '    return f"{x + 1} {x!r:>{w}}", [\n        1,\n    ]\n'
    # def f ( x ) : "doc" return f"..." with x + 1, x and w inside, then , [ 1 , ]
    assert tokens.count(source) == 6 + 1 + 1 + 1 + 5 + 5
    assert [name for _, name in tokens.functions(source + "class A:\n    pass\n")] == [
        "f",
        "class A",
    ]


def large_definitions(source):
    """`name: tokens` of every function and class that is larger than its limit."""
    large = []
    for size, name in tokens.functions(source):
        limit = TOKENS_OF_MAIN if name == "main" else TOKENS_PER_FUNCTION
        if size > (TOKENS_PER_CLASS if name.startswith("class ") else limit):
            large.append(f"{name}: {size}")
    return large


def test_large_definitions_are_found():
    assert large_definitions("def f():\n" + "    x = 1\n" * 165) == []
    assert large_definitions("def f():\n" + "    x = 1\n" * 166) == ["f: 503"]
    assert large_definitions("def main():\n" + "    x = 1\n" * 665) == []
    assert large_definitions("class A:\n" + "    x = 1\n" * 667) == ["class A: 2004"]


@pytest.mark.parametrize("name", [*TOKENS, *TOOLS])
def test_definitions_are_small(name):
    assert large_definitions(text_of(name)) == []


def unreached_definitions(source, with_methods=True):
    """Functions, classes, methods and constants of a script that nothing reached from `main` or from a public trainer
    (its class, the name of its settings, `train` and `train_step`) names.

    A method counts as reached if its name is read as an attribute somewhere in reached code outside
    of itself. Python
    and PyTorch call methods with double underscores, `forward` and `backward`.
    """
    tree = parse(source)
    definitions, pending = (
        {},
        [
            "main",
            *re.findall(
                r"^(?:class )?(\w+(?:Config(?= = Settings)|Quantizer(?=\b)))", source, re.M
            ),
        ],
    )
    for node in tree.body:
        names = []
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [
                target.id
                for target in ast.walk(node)
                if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store)
            ]
        if not names and not isinstance(node, ast.Import | ast.ImportFrom):
            pending += [name.id for name in ast.walk(node) if isinstance(name, ast.Name)]
        for name in names:
            definitions.setdefault(name, []).append(node)
    reached = set()
    while pending:
        name = pending.pop()
        if name in reached or name not in definitions:
            continue
        reached.add(name)
        for node in definitions[name]:
            pending += [inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)]
    unreached = sorted(set(definitions) - reached)
    attributes = [
        node
        for name in reached
        for part in definitions[name]
        for node in ast.walk(part)
        if isinstance(node, ast.Attribute)
    ]
    for name in sorted(reached if with_methods else []):
        for method in [
            inner
            for node in definitions[name]
            if isinstance(node, ast.ClassDef)
            for inner in node.body
            if isinstance(inner, ast.FunctionDef)
        ]:
            inside = {id(node) for node in ast.walk(method)}
            is_called = any(
                node.attr == method.name and id(node) not in inside for node in attributes
            )
            if not (is_called or method.name.startswith("__") or method.name in CALLED):
                unreached.append(f"{name}.{method.name}")
    return unreached


def test_unreached_definitions_are_found():
    source = (
        "LIMIT = 1\nUNUSED = 2\ndef main():\n    A().go()\n"
        "class A:\n    def go(self):\n        return LIMIT\n"
        "    def lost(self):\n        return self.lost()\ndef dead():\n    return dead()\n"
        "if __name__ == '__main__':\n    main()\n"
    )
    assert unreached_definitions(source) == ["UNUSED", "dead", "A.lost"]


@pytest.mark.parametrize("name", TOKENS)
def test_every_definition_is_reached_from_main(name):
    # Only the training scripts call every method of the classes that they share with the two readers.
    assert unreached_definitions(text_of(name), name.startswith("train_")) == []


@pytest.mark.parametrize("name", TOKENS)
def test_settings_are_few(name):
    assert len(settings_fields(text_of(name))) <= (
        SETTINGS if name == "train_gpt.py" else OTHER_SETTINGS
    )


def named_in_map(docstring):
    """Return the definitions that the map at the end of a docstring names, before its remarks."""
    rows = docstring.partition("Where to change what:\n")[2].splitlines()
    places = [re.split("  +", row.strip())[1] for row in rows if row.startswith("    ")]
    return ", ".join(place.partition(";")[0] for place in places).split(", ")


@pytest.mark.parametrize("name", TOKENS)
def test_the_map_of_a_script_names_what_is_there(name):
    tree = parse(text_of(name))
    defined = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    for node in tree.body:
        defined.add(getattr(node, "name", ""))
        if isinstance(node, ast.ClassDef):
            methods = [inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)]
            defined |= {f"{node.name}.{method}" for method in methods}
    named = named_in_map(ast.get_docstring(tree))
    assert len(named) >= 10 and set(named) <= defined, set(named) - defined


@pytest.mark.parametrize("name", POLICIES)
def test_an_algorithm_is_a_page(name):
    """What is not fenced between settings and main: losses and the trainer."""
    _, _, rest = text_of(name).partition("- objective\n")
    assert 800 < tokens.count(rest.partition("# ---------")[0]) <= TOKENS_PER_PAGE


@pytest.mark.parametrize("name", [*TOKENS, *TOOLS])
def test_statements_are_plain(name):
    """No exemption from the formatter or the linter; one conditional expression a statement, none inside another; one
    `for` and one `if` a comprehension, none inside another; no tuple assignment of unrelated things."""
    text = text_of(name)
    assert not re.search(r"# (fmt: |noqa|ruff: )", text)
    assert dense_statements(text) == []


def dense_statements(source):
    """`line: what` of every statement that holds more than one thought."""
    tree, dense = parse(source), []
    comprehensions = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    for node in ast.walk(tree):
        if isinstance(node, comprehensions):
            inner = [
                part
                for part in ast.walk(node)
                if isinstance(part, comprehensions) and part is not node
            ]
            if inner or len(node.generators) > 1 or len(node.generators[0].ifs) > 1:
                dense.append(f"{node.lineno}: comprehension")
        pair = [node.targets[0], node.value] if isinstance(node, ast.Assign) else [None, None]
        if all(isinstance(side, ast.Tuple) for side in pair):
            dense.append(f"{node.lineno}: tuple assignment")
        if isinstance(node, ast.stmt) and not isinstance(
            node, ast.FunctionDef | ast.ClassDef | ast.If | ast.For | ast.While | ast.With | ast.Try
        ):
            count = sum(isinstance(part, ast.IfExp) for part in ast.walk(node))
            if count > 1:
                dense.append(f"{node.lineno}: {count} conditional expressions")
    return dense


def test_dense_statements_are_found():
    for source in (
        "a, b = x, y",
        "x = a if b else c if d else e",
        "x = [i for r in s for i in r]",
        "x = [[i for i in r] for r in s]",
        "x = [i for i in r if a if b]",
    ):
        assert len(dense_statements(source)) >= 1, source
    assert dense_statements("a, b = f()\nx = a if b else c\ny = [i for i in r if i]\n") == []


def test_columns():
    long = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked()
        if path.suffix in (".py", ".sh", ".env")
        if "records" not in path.parts
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > COLUMNS
    ]
    assert not long, "\n".join(long)


# Imports scripts, each in a fork inside an empty folder, and reports, as lines, whatever one did
# beyond defining
# things. The environment and sockets are watched by who asks: modules of the standard library and
# of packages may read
# their own variables. Packages are there already, for to import them takes longer than all else.
IMPORT = """
import importlib.util, os, sys
import sentencepiece, tiktoken, torch, torch.distributed.fsdp, torch.distributed.tensor, zstandard
for script, folder in zip(sys.argv[1::2], sys.argv[2::2]):
    if not os.fork():
        os.chdir(folder)
        for number in (1, 2):
            os.dup2(os.open(f"{folder}.{number}", os.O_WRONLY | os.O_CREAT), number)
        break
    if os.wait()[1]:
        sys.exit(open(f"{folder}.2").read())
else:
    sys.exit()
found = []

def asker():
    frame = sys._getframe(2)
    while frame.f_code.co_filename in (os.__file__, "<frozen os>", "<frozen _collections_abc>"):
        frame = frame.f_back
    return frame.f_code.co_filename

class Watched(type(os.environ)):
    def __getitem__(self, key):
        if asker() == script:
            found.append(f"reads {key} from the environment")
        return super().__getitem__(key)
    def __iter__(self):
        if asker() == script:
            found.append("lists the environment")
        return super().__iter__()

def audit(event, arguments):
    if event in ("socket.connect", "socket.bind", "os.mkdir", "os.remove", "os.rename"):
        found.append(f"{event} {arguments}")

os.environ.__class__ = Watched
before = dict(os.environ)
sys.path.insert(0, os.path.dirname(script))
spec = importlib.util.spec_from_file_location("imported", script)
module = importlib.util.module_from_spec(spec)
sys.modules["imported"] = module
sys.addaudithook(audit)
spec.loader.exec_module(module)
if torch.cuda.is_initialized():
    found.append("CUDA is initialized")
if torch.distributed.is_available() and torch.distributed.is_initialized():
    found.append("a process group is open")
if torch.get_default_dtype() != torch.float32 or not torch.is_grad_enabled():
    found.append("torch's defaults are changed")
if dict(os.environ) != before:
    found.append("the environment is changed")
print("\\n".join(found), end="")
"""


def import_effects(scripts, folder):
    """Import scripts in processes of their own, under nonsense settings; what each did, as text."""
    nonsense = {
        "SEED": "notanumber",
        "CONFIG": "missing.env",
        "COMPILE": "maybe",
        "RANK": "x",
        "WORLD_SIZE": "y",
        "LOCAL_RANK": "z",
        "DATA_PATH": "/nonexistent",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    folders = [folder / str(number) for number in range(len(scripts))]
    for each in folders:
        each.mkdir()
    words = [str(word) for pair in zip(scripts, folders, strict=True) for word in pair]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT, *words],
        env={**os.environ, **nonsense},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    said = ["".join(Path(f"{each}.{number}").read_text() for number in (1, 2)) for each in folders]
    return [
        own + "".join(f"\nleft {path.name}" for path in each.iterdir())
        for own, each in zip(said, folders, strict=True)
    ]


def test_import_has_no_effects(tmp_path):
    names = [name for name in NAMES if name not in TOOLS]
    found = import_effects([ROOT / name for name in names], tmp_path)
    assert {name: effects for name, effects in zip(names, found, strict=True) if effects} == {}


@functools.cache
def settings_fields(source):
    """The fields of a script's Settings class: name -> (annotation, comment); {} without such a
    class.
    """
    tree = parse(source)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "Settings":
            return {
                field.target.id: (
                    ast.unparse(field.annotation),
                    comments.get(field.end_lineno) or comments.get(field.lineno - 1, ""),
                )
                for field in node.body
                if isinstance(field, ast.AnnAssign)
            }
    return {}


def unread_fields(source):
    """Fields of Settings that nothing outside the class reads: no attribute access, no getattr, no
    key of PHASE_STARTS, by which Plan reads them.
    """
    read = set()
    parts = [node for node in parse(source).body if getattr(node, "name", "") != "Settings"]
    for node in itertools.chain(*map(ast.walk, parts)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            read.add(node.attr)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PHASE_STARTS":
            read |= {key.value for key in node.value.keys}
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            read |= {name.value for name in node.args if isinstance(name, ast.Constant)}
    return sorted(set(settings_fields(source)) - read)


@scripts
def test_every_setting_is_read_and_commented(name):
    assert unread_fields(text_of(name)) == []
    comments = [comment for _, comment in settings_fields(text_of(name)).values()]
    assert all(comments), comments


def test_a_setting_is_the_same_line_in_every_script():
    first = {}
    different = []
    for name in NAMES:
        for field, line in settings_fields(text_of(name)).items():
            origin, expected = first.setdefault(field, (name, line))
            if line != expected:
                different.append(f"{field}: {name} has {line}, {origin} has {expected}")
    assert not different, "\n".join(different)


def test_configs_are_short():
    lines = {
        path.name: len(path.read_text(encoding="utf-8").splitlines())
        for path in ROOT.glob("configs/*.env")
    }
    assert {name: count for name, count in lines.items() if count > LINES_PER_CONFIG} == {}


# Written in two halves, so that this file does not find itself.
NOT_OURS = [
    re.compile(re.escape(a + b))
    for a, b in (
        ("/wo", "rk/"),
        ("/ro", "ot/"),
        ("/tmp", "/v/"),
        ("/opt/", "pypi"),
        ("/opt/", "wheels"),
        ("/ho", "me/"),
        ("pypi", ".org"),
        ("python", "hosted"),
        ("npm", "js.org"),
        ("deb.de", "bian.org"),
        ("crates", ".io"),
    )
]
PYTORCH_INDEX = "download.py" + "torch.org"


def test_no_machine_paths_and_no_registries():
    found = []
    for path in tracked():
        text = path.read_bytes().decode("utf-8", errors="replace")
        found += [
            f"{path.relative_to(ROOT)}: {pattern.pattern}"
            for pattern in NOT_OURS
            if pattern.search(text)
        ]
        if PYTORCH_INDEX in text and path != ROOT / "run.sh":
            found.append(f"{path.relative_to(ROOT)}: {PYTORCH_INDEX}")
    assert not found, "\n".join(found)


def files_in_commands(text):
    """Scripts and configs that the ```bash blocks of a document name, without those that a command
    there writes by
    `>`; words with placeholders are left out."""
    written = re.findall(r" > ([\w./-]+)", text)
    words = [
        word
        for block in re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
        for word in re.split(r"[\s=;]+", line.split("#")[0])
    ]
    return [
        word
        for word in words
        if re.fullmatch(r"[\w./-]+\.(py|sh|env)", word) and word not in written
    ]


def test_documented_commands_name_files_that_exist():
    missing = [
        f"{path.name}: {name}"
        for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
        for name in files_in_commands(path.read_text(encoding="utf-8"))
        if not (ROOT / name).exists()
    ]
    assert not missing, "\n".join(missing)


def test_grpo_and_gspo_differ_by_few_lines():
    """GRPO alone has LOSS, REDUCTION, RATIO_LIMIT and a TEACHER."""
    listed = subprocess.run(
        ["diff", "train_grpo.py", "train_gspo.py"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    counts = {mark: sum(line.startswith(mark) for line in listed.splitlines()) for mark in "<>"}
    assert 0 < counts["<"] <= 140 and 0 < counts[">"] <= 80, counts
