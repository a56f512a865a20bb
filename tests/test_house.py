"""The rules of the house, held over every script: fences, sizes, imports without effects, settings,
docs, paths.
"""

import ast
import functools
import io
import os
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict

import pytest

from conftest import ROOT, load_tool

LINES_PER_CONFIG = 18
# Tokens at most, as tools/tokens.py counts them. These limits are lifted while published models, rows
# and rewards as users write them are made to work; the changes after that set them anew.
TOKENS = {
    "train_gpt.py": 31_000,
    "train_sft.py": 40_500,
    "train_dpo.py": 40_500,
    "train_ppo.py": 47_500,
    "train_grpo.py": 49_500,
    "train_gspo.py": 49_500,
    "quantize.py": 20_500,
    "convert.py": 27_500,
    "sample.py": 33_500,
}
POLICIES = ["train_grpo.py", "train_gspo.py", "train_ppo.py"]
TOKENS_OF_KERNELS, TOKENS_OF_MODEL = 1_500, 8_000
TOKENS_OF_MAIN, TOKENS_PER_FUNCTION, TOKENS_PER_CLASS = 2_000, 500, 2_000
CALLED = ("forward", "backward", "train", "train_step")  # by PyTorch, or in programs
SETTINGS, OTHER_SETTINGS = 63, 63
TOKENS_PER_PAGE = 3_000
TOKENS_OF_TESTS = 210_000  # of all of them, a tenth above what stands there

sync, tokens = load_tool("sync"), load_tool("tokens")

# Every script of the house: those at the top (the smoke test is a test), the data scripts, the
# tools.
NAMES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.py", "data/*.py", "tools/**/*.py")
    for path in ROOT.glob(pattern)
    if not path.name.startswith("test_")
)
TOOLS = [name for name in NAMES if name.startswith("tools/")]


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


def test_the_tests_sizes():
    paths = [*ROOT.glob("tests/*.py"), ROOT / "conftest.py", ROOT / "test_smoke.py"]
    sizes = [tokens.count(path.read_text(encoding="utf-8")) for path in paths]
    assert sum(sizes) <= TOKENS_OF_TESTS


def test_tokens_are_counted():
    source = 'def f(x):\n    """Doc."""\n    # a comment\n'
    source += '    return f"{x + 1} {x!r:>{w}}", [\n        1,\n    ]\n'
    # def f ( x ) : "doc" return f"..." with x + 1, x and w inside, then , [ 1 , ]
    assert tokens.count(source) == 6 + 1 + 1 + 1 + 5 + 5
    names = [name for _, name in tokens.functions(source + "class A:\n    pass\n")]
    assert names == ["f", "class A"]


@pytest.mark.parametrize("name", [*TOKENS, *TOOLS])
def test_definitions_are_small(name):
    large = []
    for size, definition in tokens.functions(text_of(name)):
        limit = TOKENS_OF_MAIN if definition == "main" else TOKENS_PER_FUNCTION
        if size > (TOKENS_PER_CLASS if definition.startswith("class ") else limit):
            large.append(f"{definition}: {size}")
    assert large == []


def names_in(node, context=ast.Load):
    """Return the names that a piece of code reads, or those that it assigns (ast.Store)."""
    names = [part for part in ast.walk(node) if isinstance(part, ast.Name)]
    return [name.id for name in names if isinstance(name.ctx, context)]


def attributes_in(*nodes):
    """Return how often each attribute is named in pieces of code."""
    parts = [part for node in nodes for part in ast.walk(node)]
    return Counter(part.attr for part in parts if isinstance(part, ast.Attribute))


def unreached_definitions(source, with_methods=True):
    """Functions, classes, methods and constants of a script that nothing reached from `main` or from
    a class for programs (its settings, a quantizer) names.

    A method counts as reached if its name is an attribute in reached code outside of itself. Python
    and PyTorch call methods with double underscores, `forward` and `backward`.
    """
    pending = re.findall(r"^(?:class )?(\w+(?:Config(?= = Settings)|Quantizer\b))", source, re.M)
    pending.append("main")
    definitions = defaultdict(list)
    for node in parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            definitions[node.name].append(node)
        elif isinstance(node, ast.Assign):
            for name in names_in(node, ast.Store):
                definitions[name].append(node)
        else:
            pending += names_in(node)
    reached = {}
    while pending:
        name = pending.pop()
        if name in definitions and name not in reached:
            reached[name] = definitions[name]
            for node in definitions[name]:
                pending += names_in(node)
    unreached = sorted(definitions.keys() - reached.keys())
    nodes = sum(reached.values(), [])
    counts = attributes_in(*nodes)
    for node in nodes if with_methods else []:
        for part in node.body if isinstance(node, ast.ClassDef) else []:
            name = getattr(part, "name", "__")
            is_called = counts[name] > attributes_in(part)[name] or name in CALLED
            if not (is_called or name.startswith("__")):
                unreached.append(f"{node.name}.{name}")
    return unreached


def test_unreached_definitions_are_found():
    source = (
        "LIMIT = 1\nUNUSED = 2\ndef main():\n    A().go()\n"
        "class A:\n    def go(self):\n        return LIMIT\n"
        "    def lost(self):\n        return self.lost()\ndef dead():\n    return dead()\n"
    )
    assert unreached_definitions(source) == ["UNUSED", "dead", "A.lost"]


@pytest.mark.parametrize("name", TOKENS)
def test_every_definition_is_reached_from_main(name):
    # Only the training scripts call every method of the classes that they share with the two readers.
    assert unreached_definitions(text_of(name), name.startswith("train_")) == []


def named_in_map(docstring):
    """Return the definitions that the map at the end of a docstring names, before its remarks."""
    rows = docstring.partition("Where to change what:\n")[2].splitlines()
    places = [re.split("  +", row.strip())[1] for row in rows if row.startswith("    ")]
    return ", ".join(place.partition(";")[0] for place in places).split(", ")


@pytest.mark.parametrize("name", TOKENS)
def test_the_map_of_a_script_names_what_is_there(name):
    tree = parse(text_of(name))
    defined = {*names_in(tree, ast.Store)}
    for node in tree.body:
        own = getattr(node, "name", "")
        methods = node.body if isinstance(node, ast.ClassDef) else []
        defined |= {own, *(f"{own}.{getattr(part, 'name', '')}" for part in methods)}
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
    dense = []
    comprehensions = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
    blocks = ast.FunctionDef | ast.ClassDef | ast.If | ast.For | ast.While | ast.With | ast.Try
    for node in ast.walk(parse(source)):
        parts = list(ast.walk(node))
        if isinstance(node, comprehensions):
            first = node.generators[0]
            is_nested = sum(isinstance(part, comprehensions) for part in parts) > 1
            if is_nested or len(node.generators) > 1 or len(first.ifs) > 1:
                dense.append(f"{node.lineno}: comprehension")
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            if isinstance(node.targets[0], ast.Tuple):
                dense.append(f"{node.lineno}: tuple assignment")
        if isinstance(node, ast.stmt) and not isinstance(node, blocks):
            if sum(isinstance(part, ast.IfExp) for part in parts) > 1:
                dense.append(f"{node.lineno}: conditional expressions")
    return dense


def test_dense_statements_are_found():
    for source in (
        "a, b = x, y",
        "x = a if b else c if d else e",
        "x = [i for r in s for i in r]",
        "x = [[i for i in r] for r in s]",
        "x = [i for i in r if a if b]",
    ):
        assert dense_statements(source), source
    assert dense_statements("a, b = f()\nx = a if b else c\ny = [i for i in r if i]\n") == []


# Imports scripts, each in a fork inside an empty folder, and reports, as lines, whatever one did
# beyond defining things. The environment and sockets are watched by who asks: modules of the
# standard library and of packages may read their own variables. Packages are there already, for
# to import them takes longer than all else.
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
print("\\n".join(found), end="", flush=True)
os._exit(0)  # Python takes seconds to clear away what a fork shares with its parent
"""


def test_import_has_no_effects(tmp_path):
    """Under settings that make no sense, in an empty folder."""
    nonsense = dict(SEED="notanumber", CONFIG="missing.env", COMPILE="maybe", RANK="x")
    nonsense |= dict(WORLD_SIZE="y", LOCAL_RANK="z", DATA_PATH="/none", PYTHONDONTWRITEBYTECODE="1")
    words = []
    for name in NAMES:
        if name not in TOOLS:
            folder = tmp_path / name.replace("/", "_")
            folder.mkdir()
            words += [ROOT / name, folder]
    command = [sys.executable, "-c", IMPORT, *map(str, words)]
    done = subprocess.run(command, env={**os.environ, **nonsense}, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for path in sorted(tmp_path.iterdir()):  # folders, and what the scripts said, in <folder>.<n>
        found = list(path.iterdir()) if path.is_dir() else path.read_text()
        assert not found, path


# ----------------------------------------------------------------------------------------- settings
@functools.cache
def settings_fields(source):
    """The fields of a script's Settings class: name -> (annotation, comment); {} without such a
    class.
    """
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}
    (settings,) = [node for node in parse(source).body if is_settings(node)] or [ast.Module([])]
    found = {}
    for field in settings.body:
        if isinstance(field, ast.AnnAssign):
            comment = comments.get(field.end_lineno) or comments.get(field.lineno - 1)
            found[field.target.id] = (ast.unparse(field.annotation), comment)
    return found


def is_settings(node):
    return getattr(node, "name", "") == "Settings"


def unread_fields(source):
    """Fields of Settings that nothing outside the class reads: no attribute and no getattr. Plan
    reads those of the phases by their names.
    """
    rest = ast.Module([node for node in parse(source).body if not is_settings(node)])
    texts = {*re.findall(r'getattr\(\w+, "(\w+)"', source), "ema", "swa", "qat"}
    return sorted(settings_fields(source).keys() - attributes_in(rest).keys() - texts)


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_is_read_and_commented(name):
    fields = settings_fields(text_of(name))
    assert unread_fields(text_of(name)) == []
    assert all(comment for _, comment in fields.values())
    assert len(fields) <= (SETTINGS if name == "train_gpt.py" else OTHER_SETTINGS)


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
    for path in ROOT.glob("configs/*.env"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= LINES_PER_CONFIG, path


# ---------------------------------------------------------------------------------------- documents
# Written in two halves, so that this file does not find itself.
NOT_OURS = (
    "/wo-rk/ /ro-ot/ /tmp-/v/ /opt/-pypi /opt/-wheels /ho-me/ pypi-.org python-hosted npm-js.org"
)
NOT_OURS += " deb.de-bian.org crates-.io download.py-torch.org"


def test_no_machine_paths_and_no_registries():
    """In no file that git tracks or would track; run.sh names PyTorch's wheels for CPUs."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = []
    for name in filter(os.path.isfile, {ROOT / name for name in listed.split("\0")}):
        text = name.read_bytes().decode("utf-8", errors="replace")
        words = [word.replace("-", "") for word in NOT_OURS.split()]
        found += [(name.name, word) for word in words if word in text]
    assert found == [("run.sh", words[-1])]


def test_git_changes_no_line_ends():
    """As it does on Windows: bash then finds no run.sh in WSL."""
    command = ["git", "check-attr", "text", "run.sh"]
    assert subprocess.check_output(command, cwd=ROOT, text=True) == "run.sh: text: unset\n"


def test_documented_commands_name_files_that_exist():
    """Scripts and configs, without those that a command there writes by `>`, and placeholders."""
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        text = path.read_text(encoding="utf-8")
        blocks = re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S)
        commands = re.sub("#.*", "", "".join(blocks))
        names = re.findall(r"(?<![^\s=;])[\w./-]+\.(?:py|sh|env)(?![^\s=;])", commands)
        written = re.findall(r" > ([\w./-]+)", text)
        assert [name for name in names if name not in written and not (ROOT / name).exists()] == []


def test_grpo_and_gspo_differ_by_few_lines():
    """GRPO alone has LOSS, REDUCTION, RATIO_LIMIT and a TEACHER."""
    command = ["diff", "train_grpo.py", "train_gspo.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    counts = {mark: sum(line.startswith(mark) for line in listed.splitlines()) for mark in "<>"}
    assert 0 < counts["<"] <= 155 and 0 < counts[">"] <= 80, counts
