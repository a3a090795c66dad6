"""Prompts of our own for each kind of task, so that a measurement needs no data. Eight a kind: a batch has no twins."""

from __future__ import annotations

LIGHTHOUSE = (
    "The lighthouse on the northern cliff was built of grey stone in 1862. Before it stood there, fishermen "
    "found their way home by the bells of the village church, which could not be heard when the wind came from "
    "the land. The first keeper, Marta Lind, lived in the tower for thirty years and wrote down the weather "
    "every morning and every evening. Her books are kept in the library of the village. In 1951 the lamp was "
    "given an electric motor, and in 1987 the last keeper left. Today the lighthouse is open to visitors from "
    "May to September, and its lamp still turns every night."
)
BREAD = (
    "A sourdough starter is a mixture of flour and water in which wild yeast and bacteria live. The yeast makes "
    "the gas that lifts the dough, and the bacteria make the acids that give the bread its taste and keep it "
    "fresh. A starter is fed once a day with equal weights of flour and water when it stands in a warm kitchen, "
    "and once a week when it is kept in a refrigerator. A starter that smells of vinegar is hungry. To bake a "
    "loaf, mix 500 grams of flour, 350 grams of water, 100 grams of starter and 10 grams of salt, let the dough "
    "rise for eight hours, and bake it for 45 minutes at 230 degrees."
)
TRAMS = (
    "The city council has decided to build a third tram line. It will run from the harbour to the university and "
    "have fourteen stops. The council expects 30,000 passengers a day and costs of 210 million, of which the "
    "state pays half. Shopkeepers in Mill Street are worried that customers will stay away during the two years "
    "of works. The mayor promised that one lane of the street will stay open at all times, and that the works "
    "will begin at the harbour so that the street is closed as late as possible. The first tram is to leave the "
    "harbour in the spring of the fifth year."
)
BEES = (
    "Honeybees tell each other where flowers are by dancing. A bee that has found food close to the hive runs in "
    "small circles. If the food is more than about a hundred metres away, she runs in a straight line while "
    "shaking her body, turns back, and runs the line again. The angle between the line and the vertical is the "
    "angle between the sun and the way to the flowers, and the longer she shakes, the farther the flowers are. "
    "The other bees follow her in the dark of the hive, feel the dance with their antennae, and then fly out. A "
    "hive can in this way change from one field to a better one within an hour."
)


def _rag(passage: str, question: str) -> str:
    return f"Answer the question with the help of this document.\n\nDocument: {passage}\n\nQuestion: {question}"


BUILT_IN: dict[str, tuple[str, ...]] = {
    "mt_bench": (
        "Write a short letter to a friend who is moving to another country.",
        (
            "Pretend that you are the captain of a ship that is stuck in the ice. What do you say to your crew "
            "this morning?"
        ),
        (
            "Five people stand in a queue. Anna is before Ben, Carl is last, and Dora stands between Ben and "
            "Emil. Who is first?"
        ),
        "What is the area of a triangle whose sides are 13, 14 and 15? Explain each step.",
        "Write a Python function that returns the longest word of a sentence, and show how it is used.",
        (
            "Make a table of names, ages and cities from this text: Ida, 31, lives in Oslo. Jon is 27 and from "
            "Bergen. Eva (45): Molde."
        ),
        "Explain to a pupil why the sky is blue and why the evening sky is red.",
        "Name three causes of the fall of the Roman Empire in the west and say which one you find most convincing.",
    ),
    "translation": (
        "Translate to English: Das Schiff verliess den Hafen am frühen Morgen, bevor der Nebel kam.",
        "Translate to English: Der Lehrer erklärte den Kindern, warum die Blätter im Herbst von den Bäumen fallen.",
        "Translate to English: Wir haben drei Stunden auf den Zug gewartet und dann den Bus genommen.",
        "Translate to English: Die Stadt will im nächsten Jahr eine neue Brücke über den Fluss bauen.",
        "Translate to English: Meine Schwester wohnt seit zehn Jahren in einem kleinen Dorf in den Bergen.",
        "Translate to English: Wer früh aufsteht, sieht die Sonne über dem See aufgehen.",
        "Translate to English: Die Ärztin sagte, dass er viel Wasser trinken und zwei Tage im Bett bleiben soll.",
        "Translate to English: Auf dem Markt kann man frisches Brot, Käse und Äpfel aus der Gegend kaufen.",
    ),
    "summarization": (
        f"Summarize this text in two sentences: {LIGHTHOUSE}",
        f"Summarize this text in two sentences: {BREAD}",
        f"Summarize this text in two sentences: {TRAMS}",
        f"Summarize this text in two sentences: {BEES}",
        f"{LIGHTHOUSE}\n\nGive this text a title and list its main points.",
        f"{BREAD}\n\nGive this text a title and list its main points.",
        f"{TRAMS}\n\nGive this text a title and list its main points.",
        f"{BEES}\n\nGive this text a title and list its main points.",
    ),
    "qa": (
        "Why do ships float although they are made of steel?",
        "What is the difference between weather and climate?",
        "Who was the first person to sail around the world, and did he come home?",
        "How does a vaccine protect against a disease?",
        "Why does the moon always show us the same side?",
        "What is a leap year, and why is it needed?",
        "How did people keep food fresh before there were refrigerators?",
        "What makes bread rise in the oven?",
    ),
    "math_reasoning": (
        (
            "A baker sells 24 loaves in the morning and half as many in the afternoon. A loaf costs 3 coins. How "
            "much does he earn in a day?"
        ),
        (
            "Lena reads 15 pages a day. Her book has 240 pages and she has read a quarter of it. How many days "
            "does she still need?"
        ),
        "A train leaves at 9:40 and arrives at 13:05. It stood still for 25 minutes. How long was it moving?",
        (
            "Three boxes weigh 4.5 kg together. The second weighs twice the first and the third as much as both. "
            "How heavy is each?"
        ),
        (
            "A garden is 12 m long and 8 m wide. A fence costs 7 coins a metre. What does the fence around the "
            "garden cost?"
        ),
        "Tom has 5 more marbles than Kim and together they have 43. How many marbles does Kim have?",
        "A coat costs 80 coins. It is made 25 % cheaper and then 10 % dearer. What does it cost now?",
        (
            "A tank holds 600 litres. A pump brings 40 litres a minute and a leak loses 10. How long does it "
            "take to fill the tank?"
        ),
    ),
    "rag": (
        _rag(LIGHTHOUSE, "Who was the first keeper of the lighthouse, and what did she leave behind?"),
        _rag(BREAD, "How often is a sourdough starter fed, and how does one see that it is hungry?"),
        _rag(TRAMS, "How much will the tram line cost the city, and why are shopkeepers worried?"),
        _rag(BEES, "How does a bee tell the others how far away the flowers are?"),
        _rag(LIGHTHOUSE, "When can visitors see the lighthouse, and when was it built?"),
        _rag(BREAD, "What does one need for a loaf of sourdough bread, and how is it baked?"),
        _rag(TRAMS, "What did the mayor promise?"),
        _rag(BEES, "What is the difference between the dances for near and for far flowers?"),
    ),
}
