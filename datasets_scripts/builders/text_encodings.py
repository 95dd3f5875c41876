"""Decode the text of tables and caption files. An encoding other than UTF-8 and UTF-16 is only used if it is certain.

Spreadsheets save "CSV" in the encoding of the computer's language. The same bytes are valid in many encodings, so a
text is decoded in each encoding that fits the languages of the table, and must be plausible in exactly one.
"""

import codecs
import logging
import os
import re
import unicodedata
from collections.abc import Callable, Iterable

from ..remote_files import refuse_pointer

logger = logging.getLogger(__name__)
_warned: set[tuple[str, str]] = set()

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
_BESIDE_ASCII = "(?<=[A-Za-z]){0}|{0}(?=[A-Za-z])"
_ALONE = r"(?<![^\W\d_]){0}(?![^\W\d_])"
_MOST, _FEW = 0.8, 0.1


def decode_text(content: bytes, where: str, languages: Iterable[str] = ("eng",), encoding: str | None = None) -> str:
    """Decode the content of a text file: UTF-8, UTF-16 with a byte order mark, or an encoding of its languages.

    Args:
        where: Name of the file for messages.
        languages: ISO 639-3 codes of the languages that the text may contain.
        encoding: Encoding of the file, if it is known.

    Raises ValueError if the text is not valid in `encoding`, or if its encoding is not certain.
    """
    refuse_pointer(content, where)
    try:
        if encoding is not None:
            return content.decode(encoding).removeprefix("\ufeff")
        if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # "Unicode text" of spreadsheets
            return content.decode("utf-16")
        if b"\0" in content:
            raise ValueError(f"{where} contains zero bytes and is not text; save it as UTF-8, or set encoding")
        return content.decode("utf-8-sig")
    except LookupError as error:
        raise ValueError(f"encoding is {encoding!r}, which is unknown; expected a name such as 'cp1252'") from error
    except UnicodeDecodeError as error:
        if encoding is not None or content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise ValueError(f"{where} is not {error.encoding}: {error.reason} at byte {error.start}") from error

    texts: dict[str, str] = {}  # plausible text -> encoding
    candidates = sorted({_ENCODINGS[language] for language in languages if language in _ENCODINGS})
    for candidate in candidates:
        try:
            text = content.decode(candidate)
        except UnicodeDecodeError:
            continue
        if _is_plausible(text, candidate):
            texts.setdefault(text, candidate)
    if len(texts) != 1:
        tried = f"in {' and '.join(texts.values())}" if texts else f"not in {', '.join(candidates) or 'any other'}"
        raise ValueError(
            f"{where} is not UTF-8, and plausible {tried}; save it as UTF-8 (in Excel: 'CSV UTF-8'), or set encoding, "
            "such as gb18030 (Chinese), cp932 (Japanese), cp1251 (Russian), cp1250 (Polish) or cp1252 (Western Europe)"
        )
    ((text, candidate),) = texts.items()
    if (os.path.dirname(where), candidate) not in _warned:  # once for the text files of a folder
        _warned.add((os.path.dirname(where), candidate))
        logger.warning("%s is not UTF-8; it is read as %s; set encoding if this is wrong", where, candidate)
    return text


def _is_plausible(text: str, encoding: str) -> bool:
    """Return whether the characters beyond ASCII are those of the languages of an encoding, in plausible positions."""
    foreign = [character for character in _PUNCTUATION.sub("", text) if ord(character) > 127]
    if not foreign:
        return True

    def share(test: Callable[[str], bool]) -> float:
        return sum(map(test, foreign)) / len(foreign)

    if encoding == "gb18030":  # wrong text has rare characters, which the older standard lacks
        return share(lambda character: _can_encode(character, "gb2312")) > 1 - _FEW
    if encoding == "cp932":
        is_kana = share(lambda character: "\u3040" <= character <= "\u30ff") > 2 * _FEW
        return is_kana and share(lambda character: "\uff61" <= character <= "\uff9f") < _FEW
    if encoding == "cp949":
        return share(lambda character: "\uac00" <= character <= "\ud7a3") > _MOST

    script = {"cp1251": "CYRILLIC", "cp1253": "GREEK"}.get(encoding, "LATIN")
    if share(lambda character: character.isalpha() and _script_of(character) == script) < 1 - _FEW:
        return False
    # KOI8, in which the small letters of cp1251 are capital letters
    if script == "CYRILLIC" and share(str.isupper) > 0.5:
        return False
    if encoding == "cp1252" and share(lambda character: character in "ÐÞðþ") > _FEW:  # ĞŞğş of Turkish
        return False
    # Latin letters with accents are beside letters of ASCII, or alone; Cyrillic and Greek words have no such letters.
    group = f"[{re.escape(''.join(set(foreign)))}]"
    mixed = len(re.findall(_BESIDE_ASCII.format(group), text)) / len(foreign)
    alone = len(re.findall(_ALONE.format(group), text)) / len(foreign)
    return mixed + alone > 0.5 if script == "LATIN" else mixed < _FEW


def _script_of(character: str) -> str:
    return unicodedata.name(character, "").partition(" ")[0]


def _can_encode(character: str, encoding: str) -> bool:
    try:
        character.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True
