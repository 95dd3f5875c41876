"""Decode the text of tables and caption files. An encoding other than UTF-8 and UTF-16 is only used if it is certain.

Spreadsheets save "CSV" in the encoding of the computer's language. The same bytes are valid in many encodings, so a
text is decoded in each encoding that fits the languages of the table, and must be plausible in exactly one.
"""

import codecs
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ..remote_files import refuse_pointer
from .columns import warn_once

# Encodings of Windows, by the languages that they are the default for.
_LANGUAGES = {
    "gb18030": "zho yue wuu",
    "cp932": "jpn",
    "cp949": "kor",
    "cp1251": "rus ukr bel bul srp mkd kaz mon",
    "cp1250": "pol ces slk hun slv hrv bos ron sqi",
    "cp1252": "eng fra deu spa nld cat ita por glg eus dan swe nor nob nno isl fin gle afr ind swa",
    "cp1253": "ell",
    "cp1254": "tur aze",
    "cp1257": "lit lav est",
}
_ENCODINGS = {language: encoding for encoding, codes in _LANGUAGES.items() for language in codes.split()}

_PUNCTUATION = re.compile("[‘’“”‚„‹›«»–—…·•°€£¿¡\u00a0©®™½¼¾×]")


def decode_text(
    content: bytes, where: str | Path, languages: Iterable[str] = ("eng",), encoding: str | None = None
) -> str:
    """Decode the content of a text file: UTF-8, UTF-16 with a byte order mark, or an encoding of its languages.

    Args:
        where: Name of the file for messages.
        languages: ISO 639-3 codes of the languages that the text may contain.
        encoding: Encoding of the file, if it is known.

    Raises ValueError if the text is not valid in `encoding`, or if its encoding is not certain.
    """
    refuse_pointer(content, where)
    if encoding is None and content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"  # "Unicode text" of spreadsheets
    try:
        if encoding is not None:
            return content.decode(encoding).removeprefix("\ufeff")
        if b"\0" in content:
            raise ValueError(f"{where} contains zero bytes and is not text; save it as UTF-8, or set encoding")
        return content.decode("utf-8-sig")
    except LookupError as error:
        raise ValueError(f"encoding is {encoding!r}, which is unknown; expected a name such as 'cp1252'") from error
    except UnicodeDecodeError as error:
        if encoding is not None:
            raise ValueError(f"{where} is not {error.encoding}: {error.reason} at byte {error.start}") from error

    texts: dict[str, str] = {}  # plausible text -> encoding
    candidates = sorted({_ENCODINGS[language] for language in languages if language in _ENCODINGS})
    for candidate in candidates:
        with suppress(UnicodeDecodeError):
            text = content.decode(candidate)
            if _is_plausible(text, candidate):
                texts.setdefault(text, candidate)
    if len(texts) != 1:
        tried = f"in {' and '.join(texts.values())}" if texts else f"not in {', '.join(candidates) or 'any other'}"
        raise ValueError(
            f"{where} is not UTF-8, and plausible {tried}; save it as UTF-8 (in Excel: 'CSV UTF-8'), or set encoding, "
            "such as gb18030 (Chinese), cp932 (Japanese), cp1251 (Russian), cp1250 (Polish) or cp1252 (Western Europe)"
        )
    ((text, candidate),) = texts.items()
    place = os.path.dirname(where) or where  # once for the text files of a folder
    warn_once(f"{place}: texts are not UTF-8 and are read as {candidate}; set encoding if this is wrong")
    return text


def _is_plausible(text: str, encoding: str) -> bool:
    """Return whether the characters beyond ASCII are those of the languages of an encoding, in plausible positions."""
    foreign = re.sub(r"[\0-\x7f]", "", _PUNCTUATION.sub("", text))
    if not foreign:
        return True

    def share(pattern: str, within: str = foreign) -> float:
        return len(re.findall(pattern, within)) / len(foreign)

    if encoding == "gb18030":  # wrong text has rare characters, which the older standard lacks
        return len(foreign.encode("gb2312", "ignore").decode("gb2312")) > 0.9 * len(foreign)
    if encoding == "cp932":
        return share("[\u3040-\u30ff]") > 0.2 and share("[\uff61-\uff9f]") < 0.1
    if encoding == "cp949":
        return share("[\uac00-\ud7a3]") > 0.8

    # KOI8 has capital letters where cp1251 has small ones, and Turkish has ĞŞğş where cp1252 has others.
    unlikely, most = {"cp1251": ("[Ѐ-Я]", 0.5), "cp1252": ("[ÐÞðþ]", 0.1)}.get(encoding, (r"\s", 1))
    letter = {"cp1251": "[Ѐ-ӿ]", "cp1253": "[Ά-ώ]"}.get(encoding, "[À-ÖØ-öø-ɏ]")
    if share(letter) < 0.9 or share(unlikely) > most:
        return False
    # Latin letters with accents are beside letters of ASCII, or alone; Cyrillic and Greek words have no such letters.
    mixed = share(f"(?<=[A-Za-z]){letter}|{letter}(?=[A-Za-z])", text)
    alone = share(rf"(?<![^\W\d_]){letter}(?![^\W\d_])", text)
    return mixed < 0.1 if encoding in ("cp1251", "cp1253") else mixed + alone > 0.5
