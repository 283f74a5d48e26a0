"""HTML read strictly: every element closed where it was opened, and what a test asks about."""

from collections import Counter
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "input", "wbr", "br", "link", "img", "hr"}


@dataclass
class Element:
    """One element: its attributes, and all text inside."""

    tag: str
    attributes: dict[str, str | None]
    parents: tuple[str, ...]
    text: str = ""


@dataclass
class Page(HTMLParser):
    """A parsed page; `problems` tells what is not well-formed."""

    source: str
    elements: list[Element] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._open: list[Element] = []
        self.feed(self.source)
        self.close()
        self.problems += [f"<{e.tag}> is never closed" for e in self._open]
        ids = Counter(e.attributes["id"] for e in self.elements if "id" in e.attributes)
        self.problems += [f"id {name} is given {n} times" for name, n in ids.items() if n > 1]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs), tuple(e.tag for e in self._open))
        self.elements.append(element)
        if len(dict(attrs)) < len(attrs):
            self.problems.append(f"<{tag}> has an attribute twice: {attrs}")
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, dict(attrs), tuple(e.tag for e in self._open)))

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open[-1].tag != tag:
            self.problems.append(f"</{tag}> closes {self._open[-1].tag if self._open else 'nothing'}")
        else:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data

    def all(self, tag: str, **attributes: str) -> list[Element]:
        """Elements of a tag; `class_` wants one of the classes."""
        wanted = {k.rstrip("_").replace("_", "-"): v for k, v in attributes.items()}

        def fits(element: Element) -> bool:
            for name, value in wanted.items():
                given = element.attributes.get(name)
                if value not in (given or "").split() if name == "class" else given != value:
                    return False
            return True

        return [e for e in self.elements if e.tag == tag and fits(e)]

    def one(self, tag: str, **attributes: str) -> Element:
        """The only such element."""
        (found,) = self.all(tag, **attributes)
        return found

    @property
    def sections(self) -> list[str | None]:
        """Anchors of the parts of the page."""
        return [e.attributes.get("id") for e in self.all("section")]
