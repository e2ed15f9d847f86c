"""Text of speech on the time line of its sound, so that both can be cut at the sample that was played."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SpokenText:
    """A transcript that grows with its sound. rate: samples per second.

    marks: for each delta, the end of its text in characters and the samples that were there when it came. is_whole: the
    sound has reached its end, so that all text is spoken in it; `cut` needs no marks then.
    """

    rate: int
    text: str = ""
    samples: int = 0
    is_whole: bool = False
    marks: list[tuple[int, int]] = field(default_factory=list)

    @property
    def duration_ms(self) -> int:
        """Return the duration of the sound, rounded up."""
        return -(-self.samples * 1000 // self.rate)

    def say(self, delta: str) -> None:
        """Append text."""
        self.text += delta
        self.marks.append((len(self.text), self.samples))

    def sound(self, count: int) -> None:
        """Append samples."""
        self.samples += count

    def end(self) -> None:
        """Note that the sound is whole."""
        self.is_whole = True
        self.marks = []

    def cut(self, end_ms: int) -> None:
        """Cut sound and text at a place of the sound.

        Text has no times of its own. Of whole speech it is cut in proportion to the samples. Of speech that was
        interrupted, text that came after the place was passed is cut first: it cannot have been spoken before.
        """
        played = min(self.samples, end_ms * self.rate // 1000)
        if played >= self.samples:
            return
        known = len(self.text)
        if not self.is_whole:
            known = max((end for end, samples in self.marks if samples <= played), default=0)
        share = played / self.samples
        self.text = _whole_words(self.text, min(known, int(len(self.text) * share)))
        self.samples = played
        self.marks = [mark for mark in self.marks if mark[0] <= len(self.text)]


def _whole_words(text: str, length: int) -> str:
    """Return the first `length` characters without a word that is cut. Text without spaces is cut anywhere."""
    cut = text[:length]
    if length >= len(text) or text[length].isspace() or " " not in text:
        return cut
    return cut[: cut.rfind(" ") + 1]
