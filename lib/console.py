"""How every script reads a flag and what it prints: an error in one sentence, a line of progress, a duration."""
import argparse
import sys
import time


def stop(sentence):
    """End the program: one line on stderr, exit status 2."""
    print(f"error: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def misused(sentence):
    """What argparse says of a command line (parser.error), and where to find the flags."""
    stop(f"{sentence}; -h lists the flags")


def parser_of_commands(description):
    """A parser for a script of several commands, and where add_command adds them."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = misused
    return parser, parser.add_subparsers(required=True)


def add_command(commands, function, text):
    """Add the command of a function called cmd_NAME to commands, of parser.add_subparsers. Returns what adds its flags:
    add(name, help, ...)."""
    sub = commands.add_parser(function.__name__[4:], help=text, description=text, allow_abbrev=False)
    sub.set_defaults(function=function)
    sub.error = misused
    return lambda name, text, **options: sub.add_argument(name, help=text, **options)


def boolean(text):
    """true or false, as every flag of this project spells it; the type of an argparse flag."""
    if text.lower() in ("true", "1", "yes"):
        return True
    if text.lower() in ("false", "0", "no"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


def require_at_least(args, **bounds):
    """Stop where a flag is below its bound: require_at_least(args, tokens=1, threads=0)."""
    for name, least in bounds.items():
        value = getattr(args, name)
        if not value >= least:                   # nan, too
            stop(f"--{name}={value}: must be at least {least}")


def duration(seconds):
    """Seconds as h:mm:ss or m:ss, from 100 hours on in days."""
    s = int(seconds)
    if s >= 360_000:
        return f"{s / 86400:.0f} days"
    if s >= 3600:
        return f"{s // 3600}:{s // 60 % 60:02d}:{s % 60:02d}"
    return f"{s // 60}:{s % 60:02d}"


def progress(line, keep):
    """Show a line of progress. On a terminal it replaces the line before it, unless that one was to be kept. In a log,
    lines to be kept are printed, and of the others one a minute."""
    if sys.stdout.isatty():
        print(f"\r\033[K{line}", end="\n" if keep else "", flush=True)
    elif keep or time.time() - progress.last_printed > 60:
        print(line, flush=True)
        progress.last_printed = time.time()


progress.last_printed = time.time()
