"""Pairs of sentences from a small grammar: synthetic, German on one side and English on the other.

The words are German and English, the sentences are made up. The task is not trivial:
gender, case and number decide German articles and endings; German verbs are second in main clauses
and last in subordinate and relative ones; participles and infinitives end the clause; and English
puts `do` or `does` before `not`. So a translator needs distant words, in another order.
"""

from __future__ import annotations

import hashlib
import random
from typing import NamedTuple

# German singular and plural, gender, English singular and plural
NOUNS = """
Hund Hunde m dog dogs; Mann Männer m man men; Vater Väter m father fathers
Bruder Brüder m brother brothers; Lehrer Lehrer m teacher teachers; Arzt Ärzte m doctor doctors
Freund Freunde m friend friends; Vogel Vögel m bird birds; Koch Köche m cook cooks
König Könige m king kings; Sohn Söhne m son sons; Bäcker Bäcker m baker bakers
Frau Frauen f woman women; Katze Katzen f cat cats; Mutter Mütter f mother mothers
Schwester Schwestern f sister sisters; Tochter Töchter f daughter daughters
Ärztin Ärztinnen f surgeon surgeons; Königin Königinnen f queen queens; Maus Mäuse f mouse mice
Tante Tanten f aunt aunts; Biene Bienen f bee bees; Ente Enten f duck ducks
Kind Kinder n child children; Mädchen Mädchen n girl girls; Pferd Pferde n horse horses
Schaf Schafe n sheep sheep; Huhn Hühner n hen hens; Schwein Schweine n pig pigs
"""
THINGS = """
Baum Bäume m tree trees; Apfel Äpfel m apple apples; Tisch Tische m table tables
Stuhl Stühle m chair chairs; Brief Briefe m letter letters; Ball Bälle m ball balls
Zug Züge m train trains; Schlüssel Schlüssel m key keys; Mantel Mäntel m coat coats
Kuchen Kuchen m cake cakes; Stein Steine m stone stones; Turm Türme m tower towers
Blume Blumen f flower flowers; Tasche Taschen f bag bags; Tür Türen f door doors
Lampe Lampen f lamp lamps; Stadt Städte f town towns; Brücke Brücken f bridge bridges
Zeitung Zeitungen f newspaper newspapers; Flasche Flaschen f bottle bottles
Uhr Uhren f clock clocks; Suppe Suppen f soup soups; Karte Karten f map maps
Haus Häuser n house houses; Buch Bücher n book books; Bild Bilder n picture pictures
Auto Autos n car cars; Brot Brote n loaf loaves; Fenster Fenster n window windows
Boot Boote n boat boats; Dorf Dörfer n village villages; Lied Lieder n song songs
Messer Messer n knife knives; Glas Gläser n glass glasses; Hemd Hemden n shirt shirts
"""
ADJECTIVES = """
alt old; jung young; klein small; groß big; schön beautiful; rot red; blau blue; grün green
schwarz black; weiß white; neu new; stark strong; schwach weak; schnell fast; langsam slow
müde tired; freundlich friendly; ruhig calm; laut loud; reich rich; arm poor; klug clever
warm warm; kalt cold; schwer heavy; leicht light; seltsam strange; berühmt famous
"""
# German infinitive, third person and participle; English base, third person and participle
TRANSITIVE = """
sehen sieht gesehen see sees seen; kaufen kauft gekauft buy buys bought
finden findet gefunden find finds found; suchen sucht gesucht seek seeks sought
lieben liebt geliebt love loves loved; hören hört gehört hear hears heard
zeichnen zeichnet gezeichnet draw draws drawn; nehmen nimmt genommen take takes taken
tragen trägt getragen carry carries carried; bringen bringt gebracht bring brings brought
vergessen vergisst vergessen forget forgets forgotten; malen malt gemalt paint paints painted
waschen wäscht gewaschen wash washes washed; halten hält gehalten hold holds held
kennen kennt gekannt know knows known; verlieren verliert verloren lose loses lost
zeigen zeigt gezeigt show shows shown; verstecken versteckt versteckt hide hides hidden
"""
INTRANSITIVE = """
schlafen schläft geschlafen sleep sleeps slept; arbeiten arbeitet gearbeitet work works worked
lachen lacht gelacht laugh laughs laughed; singen singt gesungen sing sings sung
tanzen tanzt getanzt dance dances danced; weinen weint geweint cry cries cried
warten wartet gewartet wait waits waited; spielen spielt gespielt play plays played
"""
MODALS = "können kann can; müssen muss must; sollen soll should; werden wird will"
ADVERBS = "heute today; morgen tomorrow; jetzt now; oft often; manchmal sometimes; hier here"
PREPOSITIONS = "mit with; bei near; vor before; hinter behind; neben beside; unter under"
CONJUNCTIONS = "weil because; wenn when; obwohl although; während while; bevor before"
SAYING = """
glauben glaubt believe believes; wissen weiß know knows; sagen sagt say says
hoffen hofft hope hopes; denken denkt think thinks
"""
PRONOUNS = "ich 1 I; er 3 he; sie 3 she; wir p we; sie p they"

ARTICLES = {
    "nom": {"m": "der", "f": "die", "n": "das", "p": "die"},
    "acc": {"m": "den", "f": "die", "n": "das", "p": "die"},
    "dat": {"m": "dem", "f": "der", "n": "dem", "p": "den"},
}
# endings of ein and mein, then of the adjective after them
EIN = {
    "nom": {"m": "", "f": "e", "n": "", "p": "e"},
    "acc": {"m": "en", "f": "e", "n": "", "p": "e"},
    "dat": {"m": "em", "f": "er", "n": "em", "p": "en"},
}
AFTER_EIN = {
    "nom": {"m": "er", "f": "e", "n": "es", "p": "en"},
    "acc": {"m": "en", "f": "e", "n": "es", "p": "en"},
    "dat": {"m": "en", "f": "en", "n": "en", "p": "en"},
}
AFTER_DER = {
    "nom": {"m": "e", "f": "e", "n": "e", "p": "en"},
    "acc": {"m": "en", "f": "e", "n": "e", "p": "en"},
    "dat": {"m": "en", "f": "en", "n": "en", "p": "en"},
}


class Phrase(NamedTuple):
    """A noun phrase on both sides, and its person: 1, 3, or p for the plural."""

    german: str
    english: str
    person: str


class Clause(NamedTuple):
    """A German clause taken apart, so that its verb can go where the clause needs it."""

    subject: str
    verb: str
    middle: str
    close: str
    english: str

    def main(self) -> str:
        return _join(self.subject, self.verb, self.middle, self.close)

    def after(self, adverb: str) -> str:
        return _join(adverb, self.verb, self.subject, self.middle, self.close)

    def last(self) -> str:
        return _join(self.subject, self.middle, self.close, self.verb)


class Grammar:
    """Sentences drawn from a seed, by `random()` alone: its stream is the same in all Pythons."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed).random

    def draw(self) -> tuple[str, str]:
        """A sentence and its translation."""
        kind = self.random()
        if kind < 0.35:
            clause = self.clause()
            german, english = clause.main(), clause.english
        elif kind < 0.5:
            adverb, translated = self.pick(ADVERBS)
            clause = self.clause()
            german, english = clause.after(adverb), _join(translated, clause.english)
        elif kind < 0.8:
            conjunction, translated = self.pick(CONJUNCTIONS)
            one, other = self.clause(), self.clause()
            german = f"{one.main()}, {conjunction} {other.last()}"
            english = f"{one.english} {translated} {other.english}"
        else:
            subject = self.pronoun() if self.random() < 0.5 else self.noun("nom")
            infinitive, third, base, thirds = self.pick(SAYING)
            clause = self.clause()
            # wissen alone has no ending in the first person: ich weiß
            first = "weiß" if infinitive == "wissen" else infinitive[:-1]
            verb = {"1": first, "3": third, "p": infinitive}[subject.person]
            said = thirds if subject.person == "3" else base
            german = f"{subject.german} {verb}, dass {clause.last()}"
            english = f"{subject.english} {said} that {clause.english}"
        return _begin(german), _begin(english)

    def clause(self) -> Clause:
        subject = self.pronoun() if self.random() < 0.25 else self.noun("nom", relative=True)
        transitive = self.random() < 0.75
        infinitive, third, participle, base, thirds, done = self.pick(
            TRANSITIVE if transitive else INTRANSITIVE
        )
        target = self.noun("acc", things=True) if transitive else Phrase("", "", "3")
        place, where = "", ""
        if self.random() < 0.2:
            preposition, translated = self.pick(PREPOSITIONS)
            near = self.noun("dat", things=self.random() < 0.5)
            place, where = f"{preposition} {near.german}", f"{translated} {near.english}"
        no, negation = ("nicht", "not") if self.random() < 0.2 else ("", "")
        # where the negation stands before a place, and after an object
        middle = _join(target.german, no, place)
        rest = _join(target.english, where)
        singular = subject.person == "3"
        tense = self.random()
        if tense < 0.5:
            verb, close = {"1": infinitive[:-1], "3": third, "p": infinitive}[subject.person], ""
            said = thirds if singular else base
            if negation:
                said = f"{'does' if singular else 'do'} not {base}"
        elif tense < 0.75:
            verb = {"1": "habe", "3": "hat", "p": "haben"}[subject.person]
            close = participle
            said = _join("has" if singular else "have", negation, done)
        else:
            plural, single, modal = self.pick(MODALS)
            first = "werde" if plural == "werden" else single
            verb = {"1": first, "3": single, "p": plural}[subject.person]
            close = infinitive
            said = _join(modal, negation, base)
        return Clause(subject.german, verb, middle, close, _join(subject.english, said, rest))

    def noun(self, case: str, *, things: bool = False, relative: bool = False) -> Phrase:
        table = THINGS if things and self.random() < 0.7 else NOUNS
        single, plural, gender, one, many = self.pick(table)
        if self.random() < 0.3:
            gender, single, one = "p", plural, many
            # the dative plural ends in n, except after n and s
            if case == "dat" and single[-1] not in "ns":
                single += "n"
        adjective, described = self.pick(ADJECTIVES) if self.random() < 0.4 else ("", "")
        kind = self.random()
        if kind < 0.55 or (gender == "p" and kind < 0.8):
            article, the, ending = ARTICLES[case][gender], "the", AFTER_DER[case][gender]
        else:
            word, the = ("mein", "my") if gender == "p" or kind > 0.8 else ("ein", "a")
            article, ending = word + EIN[case][gender], AFTER_EIN[case][gender]
        if the == "a" and (described or one)[0] in "aeiou":
            the = "an"
        if adjective:
            # müde + er is müder
            adjective = adjective.removesuffix("e") + ending
        german, english = _join(article, adjective, single), _join(the, described, one)
        person = "p" if gender == "p" else "3"
        if relative and self.random() < 0.15:
            infinitive, third, _, base, thirds, _ = self.pick(TRANSITIVE)
            other = self.noun("acc", things=True)
            verb, said = (infinitive, base) if person == "p" else (third, thirds)
            german += f", {ARTICLES['nom'][gender]} {other.german} {verb},"
            english += f" who {said} {other.english}"
        return Phrase(german, english, person)

    def pronoun(self) -> Phrase:
        german, person, english = self.pick(PRONOUNS)
        return Phrase(german, english, person)

    def pick(self, table: str) -> list[str]:
        rows = _ROWS[table]
        return rows[int(self.random() * len(rows))]


def draw_pairs(sizes: dict[str, int], seed: int) -> dict[str, list[tuple[str, str]]]:
    """Different pairs for each split; no sentence of either side is in two splits."""
    grammar = Grammar(seed)
    names = list(sizes)
    total = sum(sizes.values())
    splits: dict[str, list[tuple[str, str]]] = {name: [] for name in names}
    seen: set[tuple[str, str]] = set()
    while any(len(splits[name]) < sizes[name] for name in names):
        pair = grammar.draw()
        # split by the English side: sentences with one translation stay in one split
        at = int.from_bytes(hashlib.sha256(pair[1].encode()).digest()[:8]) % total
        for name in names:
            if at < sizes[name]:
                break
            at -= sizes[name]
        if pair not in seen and len(splits[name]) < sizes[name]:
            seen.add(pair)
            splits[name].append(pair)
    return splits


def _join(*words: str) -> str:
    return " ".join(word for word in words if word)


def _begin(sentence: str) -> str:
    sentence = sentence.rstrip(",").replace(",,", ",")
    return sentence[0].upper() + sentence[1:] + "."


def _read(table: str) -> list[list[str]]:
    return [row.split() for line in table.strip().splitlines() for row in line.split(";")]


_ROWS = {
    table: _read(table)
    for table in (
        *(NOUNS, THINGS, ADJECTIVES, TRANSITIVE, INTRANSITIVE, MODALS, ADVERBS),
        *(PREPOSITIONS, CONJUNCTIONS, SAYING, PRONOUNS),
    )
}
