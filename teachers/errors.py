"""What can go wrong with a teacher. Each message says which teacher, what happened and what to change."""


class TeacherError(ValueError):
    """Base of the errors of this package; a user's input or a server's answer caused it."""


class TeacherUnavailable(TeacherError):
    """The teacher did not answer within its retries."""


class TeacherMismatch(TeacherError):
    """The teacher cannot score this student: other tokenizer, vocabulary, model name or context length."""


class TeacherCannot(TeacherError):
    """The teacher is asked for a measurement that its transport cannot deliver."""
