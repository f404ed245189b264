"""Make the Python environment of a checkout, then run something in it. Standard library only.

    python3 scripts/bootstrap.py                     make or check the environment
    python3 scripts/bootstrap.py run -m pytest       the same, then run that environment's Python with these arguments
    python3 scripts/bootstrap.py where               print the interpreter that would be used

The environment is the active Python if it already has torch >= 2.10, else ``.venv`` in the checkout. What is
installed is read from pyproject.toml, and a stamp keyed on it makes the second call cost a few milliseconds.
Runs on Python 3.7 and later only to say, or to find, which newer Python to use.
"""

import glob
import hashlib
import os
import re
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
OLDEST = (3, 10)
TORCH_OLDEST = (2, 10)
TORCH_CPU = "torch==2.13.0"  # the version every test on a machine without a GPU is run with
TORCH_GPU = "torch>=2.10"
EXTRAS = ("dev",)
RECIPE = "2"  # part of the stamp: raise it when this file installs differently


class SetupError(Exception):
    """Something only the person at the keyboard can fix; the message says how."""


def say(text):
    print("[setup] " + text, file=sys.stderr, flush=True)


def run(args, **kwargs):
    say(" ".join(args))
    subprocess.run(args, check=True, **kwargs)


# --- Which Python ------------------------------------------------------------------------------------------


def new_enough_python():
    """This interpreter if it is new enough, else the newest suitable one on PATH."""
    if sys.version_info >= OLDEST:
        return sys.executable
    for minor in range(14, OLDEST[1] - 1, -1):
        found = shutil.which("python3.%d" % minor)
        if found and version_of(found):
            return found
    raise SetupError(
        "Python %d.%d or later is needed; %s is %d.%d and no newer python3.x is on PATH"
        % (OLDEST + (sys.executable,) + tuple(sys.version_info[:2]))
    )


def version_of(python):
    """(major, minor) of an interpreter, or None if it does not run (a shim with nothing behind it)."""
    code = "import sys; print(*sys.version_info[:2])"
    out = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return tuple(int(n) for n in out.stdout.split()) if out.returncode == 0 else None


def torch_of(python):
    """The version of torch an interpreter has, without importing it (an import takes seconds), or None."""
    code = "from importlib.metadata import version; print(version('torch'))"
    out = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return out.stdout.strip() or None


def at_least(version, oldest):
    numbers = [int(n) for n in re.findall(r"\d+", version)[: len(oldest)]]
    return tuple(numbers) >= oldest


def venv_python():
    return os.path.join(VENV, "bin", "python")


def choose():
    """(interpreter, in_place): the active Python with torch in it, or the checkout's own environment."""
    python = new_enough_python()
    torch = torch_of(python)
    if torch and at_least(torch, TORCH_OLDEST):
        return python, True
    return venv_python(), False


# --- What to install ---------------------------------------------------------------------------------------


def requirements():
    """The project's dependencies and those of EXTRAS, read from pyproject.toml (tomllib is newer than 3.10)."""
    with open(os.path.join(ROOT, "pyproject.toml"), encoding="utf-8") as file:
        text = file.read()
    wanted = []
    for key in ("dependencies",) + EXTRAS:
        match = re.search(r"^%s = \[\n(.*?)^\]" % key, text, re.MULTILINE | re.DOTALL)
        if not match:
            raise SetupError("pyproject.toml: no list called %r" % key)
        wanted += re.findall(r'^\s*"([^"]+)"', match.group(1), re.MULTILINE)
    return wanted


def has_gpu():
    if glob.glob("/proc/driver/nvidia/gpus/*") or glob.glob("/dev/nvidia[0-9]*"):
        return True
    smi = shutil.which("nvidia-smi")
    if not smi:
        return False
    done = subprocess.run([smi, "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return done.returncode == 0 and "GPU" in done.stdout


def digest(python):
    parts = [RECIPE, python, TORCH_GPU if has_gpu() else TORCH_CPU] + requirements()
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]


def missing_from(python):
    """The requirements an interpreter lacks, by name and lower bound (pip has the last word when it installs)."""
    code = (
        "import sys; from importlib.metadata import version, PackageNotFoundError\n"
        "for name in sys.argv[1:]:\n"
        "    try: print(version(name))\n"
        "    except PackageNotFoundError: print('-')\n"
    )
    wanted = [r for r in requirements() if not r.startswith("torch")]
    names = [re.split(r"[<>=!~\[; ]", r)[0] for r in wanted]
    out = subprocess.run([python, "-c", code] + names, stdout=subprocess.PIPE, text=True, check=True)
    lacking = []
    for requirement, found in zip(wanted, out.stdout.split()):
        bound = re.search(r">=([\d.]+)", requirement)
        oldest = tuple(int(n) for n in bound.group(1).split(".")) if bound else (0,)
        if found == "-" or not at_least(found, oldest):
            lacking.append(requirement)
    return lacking


# --- Installing --------------------------------------------------------------------------------------------


def make_venv(base):
    """A virtual environment, also where Debian has split ensurepip off into python3-venv."""
    if os.path.exists(venv_python()) and version_of(venv_python()):
        return
    shutil.rmtree(VENV, ignore_errors=True)
    has_ensurepip = (
        subprocess.run([base, "-c", "import ensurepip"], stderr=subprocess.DEVNULL).returncode == 0
    )
    try:
        run([base, "-m", "venv"] + ([] if has_ensurepip else ["--without-pip"]) + [VENV])
    except subprocess.CalledProcessError as error:
        shutil.rmtree(VENV, ignore_errors=True)
        raise SetupError("could not make .venv with %s: %s" % (base, error)) from error


def pip_for(python, base):
    """The command that installs into ``python``: its own pip, else the base Python's, pointed at it."""
    if (
        subprocess.run(
            [python, "-m", "pip", "--version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ).returncode
        == 0
    ):
        return [python, "-m", "pip"]
    outer = [base, "-m", "pip", "--python", python]  # pip >= 22.3
    if (
        subprocess.run(outer + ["--version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode
        == 0
    ):
        return outer
    raise SetupError(
        "%s has neither ensurepip nor a pip of 22.3 or later, so nothing can be installed.\n"
        "        Debian and Ubuntu: apt-get install python3-venv. Or make an environment with torch in it,\n"
        "        activate it, and call make again: an active Python that has torch is used as it is." % base
    )


def check_compiler():
    if not (shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")):
        say("warning: no g++ or clang++ on PATH. Kernels for the CPU need one (Debian: apt-get install g++).")


def install(python, base, in_place):
    pip = pip_for(python, base)
    quiet = ["--disable-pip-version-check", "--quiet"]
    if in_place:
        lacking = missing_from(python)
        if lacking:  # torch is pinned to what is there: nothing may replace the build somebody chose
            run(pip + ["install"] + quiet + ["torch==" + (torch_of(python) or "")] + lacking)
        return
    have = torch_of(python)
    wanted = TORCH_GPU if has_gpu() else TORCH_CPU
    fits = have and (have.split("+")[0] == wanted[7:] if "==" in wanted else at_least(have, TORCH_OLDEST))
    if not fits:
        # First and alone: resolved together with the rest, another build of it could be chosen.
        say("installing %s (the largest download)" % wanted)
        run(pip + ["install", "--disable-pip-version-check", wanted])
    rest = [r for r in requirements() if not r.startswith("torch")]
    run(pip + ["install"] + quiet + ["torch==" + (torch_of(python) or "")] + rest)
    # Editable and without a build environment of its own, so that this step needs no network.
    run(pip + ["install"] + quiet + ["--no-deps", "--no-build-isolation", "--editable", ROOT])


def stamp_path(python, in_place):
    if in_place:
        key = hashlib.sha256(python.encode()).hexdigest()[:12]
        return os.path.join(ROOT, "build", "setup-%s.stamp" % key)
    return os.path.join(VENV, "setup.stamp")


def ensure():
    """The environment, ready; returns its interpreter."""
    python, in_place = choose()
    stamp, want = stamp_path(python, in_place), digest(python)
    try:
        with open(stamp, encoding="utf-8") as file:
            if file.read().strip() == want and os.path.exists(python):
                return python
    except OSError:
        pass
    check_compiler()
    base = new_enough_python()
    if not in_place:
        make_venv(base)
    try:
        install(python, base, in_place)
    except subprocess.CalledProcessError as error:
        if in_place:  # a machine without a network may still have all that the target needs
            say("warning: pip failed; going on without " + ", ".join(missing_from(python)))
            return python
        raise SetupError(
            "pip failed (exit %d); its message is above. Environment: %s" % (error.returncode, python)
        ) from error
    os.makedirs(os.path.dirname(stamp), exist_ok=True)
    with open(stamp, "w", encoding="utf-8") as file:
        file.write(want + "\n")
    say("ready: %s, torch %s" % (python, torch_of(python)))
    return python


def environment(python):
    """The caller's environment plus this checkout and the environment's own programs (ninja among them)."""
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(p for p in (ROOT, env.get("PYTHONPATH")) if p)
    env["PATH"] = os.pathsep.join([os.path.dirname(python), env.get("PATH", "")])
    return env


def main(argv):
    action = argv[0] if argv else "setup"
    try:
        if action == "where":
            print(choose()[0])
        elif action in ("setup", "run"):
            python = ensure()
            if action == "run":
                sys.stdout.flush()
                os.execve(python, [python] + argv[1:], environment(python))
        else:
            raise SetupError("unknown action %r: setup, run or where" % action)
    except SetupError as error:
        say("error: %s" % error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
