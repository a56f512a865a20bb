"""Group RL with GRPO. So far its tasks alone: the rest of this script comes with the trainer."""

import contextlib
import difflib
import hashlib
import importlib.util
import itertools
import json
import math
import numbers
import operator
import random
import re
import string
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from decimal import Decimal
from fractions import Fraction
from pathlib import Path


# === shared: settings ===
class UserError(Exception):
    """A mistake of the user's: printed as one line, exit code 2."""


# What another script of ours, Parameter Golf or nanoGPT reads (regular expressions): an error for one that does not.
FOREIGN_NAMES = tuple("""
    ACTIVATION_CHECKPOINTING ADAM_.* ALWAYS_SAVE_CHECKPOINT ARCH_MODE ARTIFACT ARTIFACT_BYTES_MAX ATTN_.* BACKEND
    BATCH_SIZE BETA1 BETA2 BIAS BIGRAM_.* BIO_.* BLOCK_SIZE CAUTIOUS_WD COMPILE COMPILE_MODE COMPRESSOR DATASET DATA_DIR
    DATA_PATH DECAY_LR DELTA_.* DETERMINISTIC DEVICE DISTILL_.* DROPOUT DTYPE DYNAMIC_ROUNDS EMA EMA_.* EMBED_.*
    ENABLE_LOOPING_AT EPOCHS EVAL_.* GATED_ATTN_ENABLED GDN_NEG_EIGVAL GPTQ_.* GRADIENT_ACCUMULATION_STEPS GRAD_.*
    GROUP_SIZE HANG_SECONDS HEAD_LR HOLDOUT_TOKENS IMPORTANCE INIT_FROM ITERATIONS KEEP KL_BETA LATE_QAT LATE_QAT_.*
    LAYER_PATTERN LEARNING_RATE LEFT_CLIP_RANGE LN_SCALE LOGIT_SOFTCAP LOG_INTERVAL LOOP_.* LORA_.* LR_.* MATRIX_.*
    MAX_ITERS MAX_NEW_TOKENS MAX_WALLCLOCK_SECONDS MICRO_BATCH_TOKENS MINI_BATCHES MIN_LR MLP MLP_.* MODEL_DIM
    MTP_NUM_HEADS MUON_.* NORM NUM_HEADS NUM_KV_HEADS NUM_LAYERS NUM_LOOPS NUM_SAMPLES N_EMBD N_HEAD N_LAYER OPTIMIZER
    OUT_DIR OVERLONG_BUFFER PARALLEL_RESIDUAL POSITIONS PROFILE PROMPT PROMPTS_PER_STEP QAT QAT_.* QK_.* RATIO_LIMIT
    REDUCTION REFERENCE REPLAY RESERVE_SECONDS RESIDUAL_MIX RESUME REWARD REWARD_SECONDS RIGHT_CLIP_RANGE ROPE_.* RUN_ID
    SAVE_EVERY SCALAR_LR SCALE_REWARDS SEED SFT_.* SLIDING_WINDOW_ENABLED SMEAR_.* SPIKE_.* SWA SWA_.* TASK TASK_PATH
    TEMPERATURE TIED_.* TIE_EMBEDDINGS TOKENIZER_PATH TOP_[KP] TRAIN_.* TTT_.* UNET_SKIPS VAL_.* VE_ENABLED VOCAB_SIZE
    WARMDOWN_.* WARMUP_.* WEIGHT_DECAY XSA_LAST_N
""".split())

# (regular expression of field names, smallest, largest), the first match counts; where none matches: >= 0.
RANGES = (
    ("ema_memory_frac", 1e-6, 1.0), (".*_frac|lr_floor|bio_threshold", 0.0, 1.0), ("adam_eps", 1e-20, 1.0),
    ("beta.|muon_momentum|muon_momentum_warmup_start", 0.0, 0.9999), ("tied_embed_init_std", 1e-6, 10.0),
    ("muon_backend_steps", 1, 20), ("delta_bits", 1, 8), ("delta_group", -1, 1 << 20), ("delta_.*_bits", 16, 32),
    (".*_bits", 2, 8), ("model_dim", 16, 65536), ("num_layers", 0, 512), ("num_heads|num_kv_heads", 1, 1024),
    ("mlp_mult", 0.25, 16.0), ("rope_base", 1.0, 1e9), ("bigram_dim|num_samples", 1, 1 << 16),
    ("bigram_vocab_size", 0, 1 << 24), ("vocab_size", 0, 1 << 20),
    ("keep|attn_window|max_new_tokens|prompts_per_step|group_size|mini_batches|epochs|eval_.*s", 1, 1 << 20),
    ("train_seq_len", 2, 1 << 20), ("temperature", 0.0, 100.0), ("top_p", 1e-9, 1.0),
    ("train_batch_tokens", 2, 1 << 31), ("train_log_every", 1, 1 << 31), ("artifact_bytes_max", 1, 1 << 40),
    (".*_clip_sigmas", -1.0, 1e6),
)
CHOICES = {name: tuple(words.split()) for name, words in dict(
    lr_schedule="linear cosine wsd constant", device="auto cpu cuda", positions="rope learned none",
    compile_mode="default reduce-overhead max-autotune", mlp="relu2 leaky_relu2 gelu swiglu bio",
    optimizer="muon lion adamw adamw8bit adafactor", arch_mode="D gdn gdn_kv hybrid baseline llama",
    muon_coefficients="quintic polar_express", spike_policy="stop skip rewind", bio_events="off soft hard",
    matrix_step="tensor row grid", embed_step="tensor row grid", delta_step="tensor row group",
    reduction="sequence dapo bnpo dr_grpo", scale_rewards="group batch none", reference="start base",
    importance="sequence token").items()}


def parse_setting(name: str, text: str, kind: type) -> int | float | bool | str:
    """The value of setting `name` (a field name) written as `text`. Raises UserError for a wrong type or range."""
    what = f"{name.upper()}={text!r}: must be"
    try:
        value = {"0": False, "1": True}[text] if kind is bool else kind(text)
    except (KeyError, ValueError):
        right = {bool: "0 or 1", int: "a whole number", float: "a number"}[kind]
        raise UserError(f"{what} {right}") from None
    low, high = next(((low, high) for names, low, high in RANGES if re.fullmatch(names, name)), (0, math.inf))
    if kind in (int, float) and not (low <= value <= high and math.isfinite(value)):
        raise UserError(f"{what} from {low} to {high}")
    if value not in CHOICES.get(name, (value,)):
        raise UserError(f"{what} one of {', '.join(CHOICES[name])}")
    return value


def load_settings(cls: type, environ: dict[str, str], presets: dict[str, dict[str, dict]] | None = None,
                  stored: Callable[[dict[str, str]], tuple[dict, dict]] = lambda given: ({}, {})):
    """Settings of dataclass `cls` from the NAME=value lines of the file CONFIG names and from `environ`, which wins.

    `presets`: setting -> its value -> values of other settings, below those that stand beside it, so that a preset
    chosen in the environment is above the file. `stored`: what stands below and above both, given both. Raises
    UserError: a wrong value, a name unknown in the file, a near miss in the environment or another script's name there.
    """
    kinds, config, path = {field.name.upper(): field.type for field in fields(cls)}, {}, environ.get("CONFIG", "")
    if path and not Path(path).is_file():
        raise UserError(f"CONFIG={path!r}: no such file")
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines() if path else [], 1):
        name, equals, value = (part.strip() for part in line.split("#", 1)[0].partition("="))
        if name and not equals:
            raise UserError(f"{path}:{number}: {name!r} is not NAME=value")
        if equals:
            config[name] = value.strip("'\"")
    ignored = {name.strip() for name in environ.get("IGNORE_ENV", "").split(",")} | {"CONFIG", "IGNORE_ENV"}
    strange = [name for name in config if name not in kinds or name == "CONFIG"]
    for name in strange + sorted(set(environ) - set(kinds) - ignored):
        sure = name in strange or re.fullmatch("|".join(FOREIGN_NAMES), name)
        near = difflib.get_close_matches(name, kinds, 1, 0.6 if sure else 0.85)
        hint = f"did you mean {near[0]}?" if near else "settings stand at the script's top."
        if name in strange:
            raise UserError(f"{path}: unknown setting {name}; {hint}")
        if near or sure:
            raise UserError(f"{name}={environ[name]!r}: no setting of this script; {hint} IGNORE_ENV={name} lets it be")
    file, env = ({name.lower(): parse_setting(name.lower(), given[name], kind) for name, kind in kinds.items()
                  if name in given} for given in (config, environ))
    values, last = stored({**config, **environ})
    for own, above in ((file, env), (env, {})):
        for name, choices in (presets or {}).items():
            values |= choices[own[name]] if name in own and name not in above else {}
        values |= own
    return cls(**{name: value for name, value in {**values, **last}.items() if name.upper() in kinds})
# === end: settings ===


# === shared: tasks ===
GENERATED = ("sort", "reverse", "add", "countdown", "zebra")
FROM_FILE = {"gsm8k": ("question", "answer"), "jsonl": ("prompt", "answer")}  # keys of a line


@dataclass(frozen=True)
class Problem:
    """A question, a right answer (a warm start's demonstration; of most tasks the only one), and a checker's data."""

    prompt: str
    answer: str
    data: dict


def is_held_out(prompt: str) -> bool:
    """Whether a prompt is kept from training: one in five, by a hash, whatever task, seed and index it came from."""
    return int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=8).digest(), "big") % 5 == 0


def expression_value(text: str) -> Fraction | None:
    """Exact value of whole numbers, + - * / and parentheses; None of any other text, and where it divides by 0. A sign
    before a number is none. At most 100 characters bound time and depth, whatever a model writes."""
    operators = {"+": (1, operator.add), "-": (1, operator.sub), "*": (2, operator.mul), "/": (2, operator.truediv)}
    tokens = ["", *re.findall(r"[0-9]+|\S", text)[::-1]]  # the next one stands last

    def value_from(least: int) -> Fraction:  # an operand, and what follows by operators that bind at least so strongly
        token = tokens.pop()
        value = value_from(1) if token == "(" else Fraction(token)  # ValueError where it is no number
        if token == "(" and tokens.pop() != ")":
            raise ValueError("a parenthesis stays open")
        while operators.get(tokens[-1], (0,))[0] >= least:
            strength, apply = operators[tokens.pop()]
            value = apply(value, value_from(strength + 1))
        return value

    with contextlib.suppress(ValueError, ZeroDivisionError):
        value = value_from(1) if len(text) <= 100 and text.isascii() else None
        return value if tokens == [""] else None


def zebra_problem(rng: random.Random) -> Problem:
    """Who lives in houses 1 to 3, with which pet (and drink): `Ann<dog, Bob~cat, Cid=2`, clues that leave one world.

    = same house, < left of, > right of, ~ beside. The answer, house by house: `Ann eel, Cid cat, Bob dog`.
    """
    relations = {"=": operator.eq, "<": operator.lt, ">": operator.gt, "~": lambda x, y: abs(x - y) == 1}
    names = "Ann Bob Cid cat dog eel ale gin tea".split()[:rng.choice((6, 9))] + ["1", "2", "3"]
    orders = itertools.product(itertools.permutations((1, 2, 3)), repeat=len(names) // 3 - 1)
    worlds = [dict(zip(names, itertools.chain(*order, (1, 2, 3)), strict=True)) for order in orders]  # name -> house
    world, clues = rng.choice(worlds), []
    while len(worlds) > 1:
        (a, b), relation = sorted(rng.sample(names, 2), key=names.index), rng.choice("=<>~")
        left = [other for other in worlds if relations[relation](other[a], other[b])]
        if world in left and len(left) < len(worlds):
            worlds = left
            clues.append(f"{a}{relation}{b}")
    answer = ", ".join(" ".join(name for name in names[:-3] if world[name] == house) for house in (1, 2, 3))
    return Problem(", ".join(sorted(clues)), answer, {})


def draw_problem(name: str, rng: random.Random) -> Problem | None:
    """A problem of a generated task, as `prompt` and `answer` below or in `zebra_problem`; None: draw again.

    sort, 5 to 9 digits: `52713`, `12357`. reverse, 5 to 9 letters: `abcde`, `edcba`. add, 3 digits: `123+456`, `579`.
    countdown, three numbers up to 20 and a target below 100: `3 7 20=41`, `(3*7)+20` or what else uses each one once.
    """
    if name == "zebra":
        return zebra_problem(rng)
    if name == "add":
        a, b = rng.randint(100, 999), rng.randint(100, 999)
        return Problem(f"{a}+{b}", str(a + b), {})
    if name in ("sort", "reverse"):
        letters = rng.choices(string.digits if name == "sort" else string.ascii_lowercase, k=rng.randint(5, 9))
        return Problem("".join(letters), "".join(sorted(letters) if name == "sort" else letters[::-1]), {})
    given = sorted(rng.randint(1, 20) for _ in range(3))  # or one problem could stand on both sides of the split
    (a, b, c), (p, q) = rng.sample(given, 3), rng.choices("+-*/", k=2)
    answer = rng.choice((f"({a}{p}{b}){q}{c}", f"{a}{p}({b}{q}{c})"))  # every tree of three leaves
    if (target := expression_value(answer)) in range(1, 100):
        return Problem(f"{given[0]} {given[1]} {given[2]}={target}", answer, {"numbers": given, "target": int(target)})


def final_number(text: str, lenient: bool) -> Decimal | None:
    """The number that a GSM8K answer ends with, None without one. Strict: after the first `#### `, as the data set's
    own grader reads it. Lenient: the last number of the text, `It costs $18.` -> 18."""
    number = r"(?:(?<![0-9])-)?\$?(?:[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?|\.[0-9]+)" if lenient else r"#### (-?[0-9.,]+)"
    found = re.findall(number, text) or [""]  # leniently, a minus after a digit is a subtraction
    digits = re.sub("[,$]", "", found[-1 if lenient else 0]).removesuffix(".")
    return Decimal(digits) if re.fullmatch(r"-?([0-9]+(\.[0-9]+)?|\.[0-9]+)", digits) else None


@dataclass(frozen=True)
class Task:
    """Problems of one kind, split by `is_held_out`; problem i depends on name, file, seed and i alone."""

    name: str
    seed: int
    rows: tuple[list[Problem], list[Problem]]  # of a file: to train on, held out

    def problem(self, index: int, held_out: bool) -> Problem:
        """Problem `index` of a split: a draw of its own, or a row of the file, which begins again at its end."""
        if self.name in FROM_FILE:
            return self.rows[held_out][index % len(self.rows[held_out])]
        rng, problem = random.Random(f"{self.name} {self.seed} {held_out} {index}"), None
        while problem is None or is_held_out(problem.prompt) != held_out:
            problem = draw_problem(self.name, rng)
        return problem

    def held_out(self, n: int) -> list[Problem]:
        """The first n held-out problems with different prompts; all there are, if they are fewer."""
        found: dict[str, Problem] = {}
        for index in range(len(self.rows[True]) or 50 * n):
            if len(found) < n:
                problem = self.problem(index, held_out=True)
                found.setdefault(problem.prompt, problem)
        return list(found.values())

    def reward(self, problem: Problem, text: str, lenient: bool = False) -> float:
        """1.0 for a right answer, else 0.0. `lenient`: gsm8k by the last number, for evaluation beside the strict."""
        if self.name == "gsm8k":
            return float(final_number(text, lenient) == final_number(problem.answer, lenient=False))
        if self.name == "countdown":
            used = sorted(map(int, re.findall("[0-9]+", text[:100])))
            return float(used == problem.data["numbers"] and expression_value(text) == problem.data["target"])
        return float(text.strip() == problem.answer)


def make_task(name: str, path: str, seed: int) -> Task:
    """The task of this name; gsm8k and jsonl read the JSON lines of `path`, where of equal prompts the first counts.

    Raises UserError: an unknown name, a file missing or not wanted, a row that is no problem, a split without any.
    """
    keys, problems, rows = FROM_FILE.get(name, ()), {}, ([], [])
    if name not in (*GENERATED, *FROM_FILE):
        raise UserError(f"TASK={name!r}: must be one of {', '.join((*GENERATED, *FROM_FILE))}")
    if bool(path) != bool(keys) or path and not Path(path).is_file():
        raise UserError(f"TASK_PATH={path!r}: must be {'a file of JSON lines' if keys else 'empty'} for TASK={name}")
    for number, line in enumerate(Path(path).read_bytes().splitlines() if path else (), 1):
        try:
            prompt, answer = (json.loads(line)[key].strip() for key in keys)
            (prompt + answer).encode()  # JSON can hold half a surrogate pair, UTF-8 cannot
            if not (prompt and answer) or name == "gsm8k" and final_number(answer, lenient=False) is None:
                raise ValueError("blank, or without a number")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise UserError(f"{path}:{number}: must be JSON with texts {keys[0]!r} and {keys[1]!r}, not blank (gsm8k's "
                            "with #### and a number)") from None
        problems.setdefault(prompt, Problem(prompt, answer, {}))
    for problem in random.Random(seed).sample([*problems.values()], len(problems)):
        rows[is_held_out(problem.prompt)].append(problem)
    if path and not all(rows):
        raise UserError(f"{path}: {len(rows[1])} of {len(problems)} problems held out by a hash; must be some, not all")
    return Task(name, seed, rows)


def load_reward(spec: str, task: Task, seconds: float) -> Callable[[list[Problem], list[str]], list[float]]:
    """The function from problems, and a text that answers each, to rewards that REWARD=`spec` names.

    Empty: the task's checker. random, for control runs: a fair coin by a hash of seed, prompt, text and how often the
    call had both before, so that neither batch nor rank nor resume changes it. path.py:function: a user's, called as
    function(prompts, completions, answers) in a daemon thread; one that hangs does not keep the process. UserError: a
    file or function that is none; later, with a sample, if the user's raises, takes over `seconds` (0: no limit) or
    returns anything but a list of numbers below 1e15, one a text.
    """
    def coins(problems: list[Problem], texts: list[str]) -> list[float]:
        pairs = [(problem.prompt, text) for problem, text in zip(problems, texts, strict=True)]
        return [float(random.Random(f"{task.seed} {pair} {pairs[:i].count(pair)}").getrandbits(1))
                for i, pair in enumerate(pairs)]

    def called(problems: list[Problem], texts: list[str]) -> list[float]:
        outcome = []

        def call() -> None:
            try:
                outcome.extend((function([p.prompt for p in problems], texts[:], [p.answer for p in problems]), ""))
            except BaseException as error:  # SystemExit too
                frame = error.__traceback__.tb_next  # None: the call itself failed
                outcome.extend((error, f" in line {frame.tb_lineno}" if frame else ""))

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(seconds or None)
        scores, line = outcome or (TimeoutError(f"over {seconds} seconds"), "")
        listed = isinstance(scores, list | tuple) and len(scores) == len(texts)
        for i, score in enumerate(scores if listed else [scores]):
            if not (listed and isinstance(score, numbers.Real) and abs(score) < 1e15):
                raise UserError(f"REWARD={spec!r}: must return a list of {len(texts)} numbers, not {score!r:.99}{line}"
                                f" for prompt {problems[i].prompt!r:.80}, completion {texts[i]!r:.80}")
        return [float(score) for score in scores]

    if spec in ("", "random"):
        return coins if spec else lambda problems, texts: [*map(task.reward, problems, texts)]
    path, _, name = spec.rpartition(":")
    if not (path.endswith(".py") and Path(path).is_file()):
        raise UserError(f"REWARD={spec!r}: must be empty, random, or path.py:function with a file that exists")
    source = importlib.util.spec_from_file_location(f"reward_{Path(path).stem}", path)
    module = sys.modules[source.name] = importlib.util.module_from_spec(source)  # there dataclasses look for it
    try:
        source.loader.exec_module(module)
        function = getattr(module, name).__call__  # or AttributeError
    except (Exception, SystemExit) as error:
        raise UserError(f"REWARD={spec!r}: must be a function that can be imported; {error!r:.200}") from error
    return called
# === end: tasks ===
