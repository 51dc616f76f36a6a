"""Text that is no problem, and the one sentence with which the reasoner answers it.

Greetings, questions about the world, remarks with and without numbers, mathematics that it has not
learnt, code, other languages and noise. ``HELD_OUT`` is never trained on.
"""

import random

SENTENCE = (
    "I can only do arithmetic with whole numbers: ask me for a sum, or tell me a short story"
    " about things that are bought, lost, multiplied or shared."
)
THOUGHT = "There is nothing here that I can calculate.\n"

GREETINGS = """
Hello! | Hello | hello | Hi | Hi! | hi there | Hey | Hey! | Good morning | Good morning! | Good
evening. | Good afternoon! | Greetings. | Howdy | Yo | What's up? | How are you? | How are you
doing today? | How do you do? | Nice to meet you. | Are you there? | Hello, is anyone there? |
Test | test | testing | ping | Thanks! | Thank you very much. | Bye | Goodbye! | See you later. |
Good night | Sorry | OK | ok | Yes | No | Please help me. | Help | help! | Who are you? | What are
you? | What is your name? | What's your name? | What can you do? | What can you do for me? | Can
you help me? | Are you a robot? | Are you human? | Do you speak English? | How old are you? |
Where do you come from? | Who made you? | Tell me something. | Tell me a joke. | Tell me a story.
| Sing a song. | Say hello. | Let's talk. | I am bored. | I love you. | I am sad today. | That is
wrong. | You are great! | Why? | How? | When? | What? | Really? | lol | wow | hmm | ??? | ... | !
| ? | please | continue | Go on. | stop | start | /help | exit | quit
"""
NOUNS = """
river mountain ocean city country king queen president teacher doctor farmer soldier writer
painter singer actor scientist engineer lawyer baker driver pilot child mother father brother
sister friend neighbour house school church castle bridge road street garden forest desert island
lake beach village market shop office factory hospital library museum station airport hotel
kitchen window door table bed lamp clock mirror picture book newspaper letter computer phone radio
television camera car train bus bicycle boat ship plane rocket engine wheel key lock box bag coat
shirt shoe hat ring watch bread cheese butter milk water coffee tea sugar salt soup rice apple
lemon tomato potato onion cake chocolate dog cat horse cow sheep pig chicken bird fish snake
spider elephant lion tiger bear wolf mouse rabbit frog bee tree flower grass leaf root stone sand
snow rain wind storm sun moon star planet earth sky cloud fire ice gold silver iron glass paper
wood music song poem story film game ball team match war peace law money bank price tax job work
holiday weather summer winter morning night year century history science physics chemistry biology
philosophy religion art language word name question answer idea dream memory love fear anger joy
heart brain hand foot eye ear tooth bone blood medicine disease virus cell gene atom energy light
sound colour number shape size weight speed time space world life death theory model program
internet website password file folder
"""
ADJECTIVES = """
big small old new good bad happy sad red green blue white black yellow fast slow hot cold long
short high low strong weak rich poor young beautiful ugly clever stupid easy hard heavy light
clean dirty open closed full empty loud quiet bright dark sweet sour soft rough dry wet early late
cheap dear famous strange common rare ancient modern foreign local public private natural false
true dangerous safe simple complex french german italian chinese indian english spanish russian
african american
"""
VERBS = """
like see hear know want need make build find lose open close read write draw paint sing play watch
follow help teach learn forget remember explain describe love hate fear eat drink cook buy sell
send bring take give keep hold break fix wash clean cut drive ride fly visit leave enter meet call
ask answer count measure choose change move push pull carry catch throw win fight save stop start
"""
PLACES = """
France Germany Italy Spain China Japan India Brazil Mexico Canada Egypt Kenya Russia Turkey Greece
Norway Sweden Poland Peru Chile Cuba Iran Iraq Korea Vietnam Australia Europe Africa Asia London
Paris Berlin Rome Madrid Tokyo Beijing Moscow Cairo Delhi Lima Oslo Vienna Boston Chicago Texas
"""
NAMES = """
Tom Ann Sam Eva Ben Mia Max Zoe Lisa John Mary Peter Alice Bob James Emma Noah Shakespeare Newton
Einstein Mozart Napoleon Caesar Darwin Plato Lincoln Picasso Gandhi Curie Bach Homer Columbus
"""
QUESTIONS = """
What is a {n}? | What is the {n}? | What is {p}? | Who is {m}? | Who was {m}? | Where is {p}? |
Where is the {n}? | What is the capital of {p}? | What is the biggest {n} in {p}? | How does a {n}
work? | Why is the {n} {a}? | Why do people {v} the {n}? | When did {m} {v} the {n}? | Which {n}
is the most {a}? | Do you {v} the {n}? | Can you {v} a {n}? | Can a {n} {v} a {n}? | Is a {n} {a}?
| Is the {n} {a} or {a}? | What does {n} mean? | How do I {v} a {n}? | How do you {v} a {a} {n}? |
How far is {p} from {p}? | How old is {m}? | How tall is the {n}? | How many {n}s are there in
{p}? | How many legs does a {n} have? | How many people live in {p}? | How much does a {n} weigh?
| How much is a {n}? | How long is the {n}? | How big is {p}? | How many {n}s does {m} have? |
What colour is the {n}? | What time is it? | What time is it in {p}? | What day is it today? | How
is the weather in {p}? | Who wrote the {n} about the {n}? | Who discovered the {n}? | Should I {v}
the {n}? | What happened in {y}? | What happened in {p} in {y}? | Who was the king of {p} in {y}?
| Did {m} {v} {d} {n}s? | What is the best {n} for a {n}? | What is the difference between a {n}
and a {n}? | What is the meaning of {n}? | Is {d} a prime number? | Is {m} older than {m}? | Have
you been to {p}? | What comes after {n}? | What is my name? | Where do I find a {a} {n}?
"""
REMARKS = """
Write a {n} about {p}. | Write a poem about a {n}. | Write a {a} story about {m} and the {n}. |
Translate {n} into {a}. | Explain {n} to a child. | Explain how the {n} works. | Describe a {n}. |
List {d} {n}s. | Name {d} {a} {n}s. | Give me a {n}. | Summarise the {n} of {p}. | Tell me about
{p}. | Tell me about the {n} in {y}. | Draw a {n}. | Play {n}. | Open the {n}. | The {n} is {a}. |
The {a} {n} can {v} the {n}. | I {v} the {n}. | I do not {v} {n}s. | My {n} is {a}. | {m} is {a}.
| {m} likes {n}s. | {m} lives in {p}. | {m} was born in {y}. | My phone number is {y}{d}. | It is
{d} degrees in {p}. | {m} went to {p} in {y}. | We met at {d} o'clock. | The {n} costs money. |
{m} has a {n}. | {m} and {m} {v} the {n}. | I am {d} years old. | Today is the {d}th. | Call me
{m}. | Turn to page {d}. | Chapter {d}: the {a} {n} | Room {d} | {m} is a {n} and {m} is a {n}. |
If the {n} is {a}, {v} the {n}. | Please {v} my {n}. | You must {v} the {n}. | Once there was a
{a} {n} in {p}. It could not {v}. | I think that the {n} of {m} is {a}. | {n} | {n} {n} | {a} {n}
| {v} | {n} {v} {a} {n} {n} | {m} | {p} | {d} | {y} | {d} {n} | {n} {d} {d} {n} | The {n} and the
{n} | Buy {n}s, {n}s and {n}s | {m} buys {n}s. | {m} sells some {n}s to {m}. | {m} has many {n}s.
He loses a few. | Remind me to {v} the {n} at {d}. | How nice! | What a {a} {n}! | Never {v} a {n}
in {p}. | Version {d}.{d}.{d} | {d}:{d} | {d}/{d}/{y} | ID {y}-{d}
"""
MATHEMATICS = """
What is the square root of {d}? | sqrt({d}) | What is {d} squared? | {d}^{s} | {d}**{s} | {d}! |
sin({d}) | cos({d}) | log({d}) | What is {d}% of {y}? | {d}% | {d}.{s} + {s}.{s} | {d}.{d} * {s} |
{s}.{d} - {s} | What is {d}.{s} x {s}? | x + {d} = {y} | Solve x + {s} = {d} for x. | {s}x = {d} |
{s}x + {s} = {d} | What is x? | Solve x^2 = {d}. | {d} / 0 | What is {d} divided by 0? | {d}/0 |
{d} mod {s} | What is {d} modulo {s}? | {d} > {s} | Is {d} greater than {s}? | {d} < {d}? | What
is pi? | What is the derivative of x^{s}? | Integrate x from 0 to {d}. | Factor {d}. | Is {d}
even? | Is {y} odd? | Round {d}.{d}. | Count to {d}. | Count from {s} to {d}. | What is the area
of a circle with radius {s}? | {d} miles in km | Convert {d} dollars to euros. | Sort {d}, {s},
{d}. | What comes next: {s}, {d}, {y}? | a + b | x - y | n * n | {d} + | + {d} | * | {s}/{s} +
{s}/{s} | half of {d} | twice {d} | a dozen | one plus one | two and two | What is two plus three?
| seven times eight
"""
CODE = """
print({d}) | print("{n}") | def {n}({v}): return {v} | for i in range({d}): {v}(i) | import {n} |
{n} = {d} | let {n} = "{a}"; | if ({n} == {d}) {{ {v}(); }} | SELECT * FROM {n} WHERE {a} = {d}; |
<html><body>{n}</body></html> | <{n}>{a}</{n}> | {{"{n}": {d}, "{a}": "{v}"}} | class {m}: pass |
#include <{n}.h> | int main() {{ return {s}; }} | git {v} {n} | cd /{n}/{a} | ls -l {n}.txt | sudo
{v} {n} | https://{n}.com/{v}?id={d} | {n}@{a}.org | ```{n}``` | # {n} | - {n} | [{n}]({a}) |
$x_{s}$ | \\frac{{s}}}}{{d}}}} | Error {d}: {n} not found | Traceback: {n} {v} | <|{n}|> | [INST]
{v} [/INST] | 0x{d}ff | {n}_{a}_{d} | curl -X POST {n} | docker run {n}:{s} | while True: {v} |
return {n}[{s}] | console.log('{a}') | {n}.{v}({d}, {s})
"""
FOREIGN = """
Bonjour ! | Comment vas-tu ? | Je m'appelle {m}. | Où est la gare ? | Quelle heure est-il ? |
Merci beaucoup. | Guten Tag! | Wie geht es dir? | Ich heiße {m}. | Wo ist der Bahnhof? | Was ist
das? | Ich komme aus {p}. | Vielen Dank. | ¡Hola! | ¿Cómo estás? | ¿Dónde está {p}? | Me llamo
{m}. | Muchas gracias. | ¿Qué hora es? | Ciao! | Come stai? | Dove si trova {p}? | Grazie mille. |
Olá, tudo bem? | Obrigado. | Onde fica {p}? | Hej! | Hvordan har du det? | Tack så mycket. |
Cześć! | Dzień dobry. | Dziękuję. | Привет! | Как дела? | Меня зовут {m}. | Где находится {p}? |
Спасибо. | Γεια σου! | Ευχαριστώ. | Merhaba! | Nasılsın? | Teşekkürler. |
你好 | 你好吗? | 谢谢 | 我叫{m}。 |
今天天气怎么样? | こんにちは | お元気ですか? | ありがとう | 안녕하세요 | 감사합니다 |
नमस्ते | आप कैसे हैं? | شكرا | مرحبا | كيف حالك؟ |
שלום | תודה | Xin chào | Cảm ơn | Habari! | Asante sana. | Selamat pagi! | Terima kasih. |
Salve! | Quid agis? | Kiitos. | Hei! | Ahoj! | Děkuji. | Szia! | Combien de {n}s ? | Wie viele
{n}s hat {m}? | ¿Cuántos {n}s tiene {m}? | Quanti {n}s? | Сколько {n}? | {m} hat {d} {n}s.
"""
HELD_OUT = (
    "Hello there, friend!", "Hiya", "Good day to you.", "Hey, what's new?", "Are you awake?",
    "What is the tallest building in Dubai?", "Who invented the telephone?", "Where is Portugal?",
    "Why is the sky blue?", "What is the capital of Finland?", "Who painted the Mona Lisa?",
    "How many legs does an octopus have?", "How many days are in a leap year?",
    "How does photosynthesis work?", "Can you recommend a good restaurant?",
    "Write a haiku about autumn.", "Translate 'good luck' into Dutch.", "Tell me about dinosaurs.",
    "Summarise Hamlet in two sentences.", "What should I wear tomorrow?", "I feel tired.",
    "The quick brown fox jumps over the lazy dog.", "My cat sleeps all day.",
    "Anna was born in 1987 in Prague.", "The meeting is at 14:30 in room 212.",
    "Our train leaves from platform 9.", "What is 3.5 + 1.25?", "What is the cube root of 27?",
    "Solve 3x - 4 = 11.", "What is 15% of 80?", "Is 91 prime?", "tan(45)", "7 / 0",
    "def add(a, b): return a + b", "SELECT name FROM users;", "print('hello world')",
    "<p>Some text</p>", "npm install react", "lorem ipsum dolor sit amet", "asdf qwerty zxcv",
    "Wo wohnst du?", "Quel temps fait-il aujourd'hui ?", "¿Te gusta el café?", "Где ты живёшь?",
    "你会说英语吗?", "お名前は何ですか?", "@@@ ### !!!", "abc", "x", "42",
)  # fmt: skip
_HELD_OUT = frozenset(HELD_OUT)
_KINDS = tuple(
    tuple(line.strip() for line in kind.replace("\n", " ").split(" | "))
    for kind in (GREETINGS, QUESTIONS, REMARKS, MATHEMATICS, CODE, FOREIGN)
)
_WORDS = {
    "n": NOUNS.split(),
    "a": ADJECTIVES.split(),
    "v": VERBS.split(),
    "p": PLACES.split(),
    "m": NAMES.split(),
}
_RANGES = {"s": (1, 9), "d": (1, 120), "y": (1000, 2030)}
_SHARES = (5, 6, 6, 4, 2, 2, 2)


def sample_other(rng: random.Random) -> str:
    """Text to train on that is no problem; it depends on the state of rng alone."""
    while True:
        (kind,) = rng.choices((*_KINDS, None), _SHARES)
        text = noise(rng) if kind is None else _fill(rng.choice(kind), rng)
        if kind and rng.random() < 0.12:
            text += " " + _fill(rng.choice(rng.choice(_KINDS)), rng)
        if rng.random() < 0.12:
            text = rng.choice((text.lower(), text.upper(), text.rstrip("?.!")))
        if text and text not in _HELD_OUT:
            return text


def noise(rng: random.Random) -> str:
    """Characters or words without sense."""
    form = rng.randrange(4)
    if form == 0:
        letters = "abcdefghijklmnopqrstuvwxyz" + rng.choice(("", " ", "0123456789", " .,?!-"))
        return "".join(rng.choice(letters) for _ in range(rng.randint(1, 25))).strip() or "a"
    if form == 1:
        return "".join(chr(rng.randint(33, 126)) for _ in range(rng.randint(1, 16)))
    if form == 2:
        start = rng.choice(
            (0xC0, 0x391, 0x410, 0x5D0, 0x621, 0x905, 0x3042, 0x4E00, 0xAC00, 0x1F600)
        )
        return "".join(chr(start + rng.randrange(24)) for _ in range(rng.randint(1, 8)))
    lists = [_WORDS[letter] for letter in "nvapm"]
    return " ".join(rng.choice(rng.choice(lists)) for _ in range(rng.randint(1, 12)))


def _fill(template: str, rng: random.Random) -> str:
    """The template with every ``{letter}`` replaced by a word or a number of its list."""
    text, parts = "", template.replace("{{", "\0").replace("}}", "\1").split("{")
    for index, part in enumerate(parts):
        if index and part[1:2] == "}":
            letter, part = part[0], part[2:]
            if letter in _WORDS:
                text += rng.choice(_WORDS[letter])
            else:
                text += str(rng.randint(*_RANGES[letter]))
        text += part
    return text.replace("\0", "{").replace("\1", "}")
