"""What a preflight found, and the error that it ends in."""

from collections.abc import Sequence
from dataclasses import dataclass

from teachers.errors import TeacherMismatch


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check of a preflight.

    Attributes:
      name: of the check.
      ok: it passed, or could not be made and says so in `detail`.
      detail: what was seen, with the numbers of both sides.
      fix: what to change; empty where it passed.
      is_warning: where it did not pass, the run may go on.
    """

    name: str
    ok: bool
    detail: str
    fix: str = ""
    is_warning: bool = False

    @property
    def stops(self) -> bool:
        """Whether a run must not begin."""
        return not self.ok and not self.is_warning

    def __str__(self) -> str:
        """One line for a person."""
        mark = "ok" if self.ok else "warning" if self.is_warning else "FAILED"
        return f"[{mark}] {self.name}: {self.detail}" + (f" -> {self.fix}" if self.fix and not self.ok else "")


class PreflightFailed(TeacherMismatch):
    """A teacher cannot score this student as asked; the message says what to change.

    Attributes:
      findings: all checks that were made, the passed ones too.
    """

    def __init__(self, teacher: str, findings: Sequence[Finding]):
        """Words the failed checks.

        Args:
          teacher: its name.
          findings: all of them.
        """
        self.findings = list(findings)
        failed = [finding for finding in findings if finding.stops]
        lines = "\n".join(f"  {finding.name}: {finding.detail}\n    {finding.fix}" for finding in failed)
        super().__init__(f"teacher {teacher!r} failed {len(failed)} of {len(findings)} checks before the run:\n{lines}")


def passed(name: str, detail: str) -> Finding:
    """A check that passed."""
    return Finding(name=name, ok=True, detail=detail)


def failed(name: str, detail: str, fix: str) -> Finding:
    """A check that stops the run."""
    return Finding(name=name, ok=False, detail=detail, fix=fix)


def warned(name: str, detail: str, fix: str) -> Finding:
    """A check that did not pass, and that may be meant so."""
    return Finding(name=name, ok=False, detail=detail, fix=fix, is_warning=True)
