"""Everyday English words by class. `sentences` builds its templates and word salad from them."""

from __future__ import annotations

from typing import Final

PEOPLE: Final = tuple(
    """mother father sister brother friend teacher doctor farmer baker nurse driver child baby king queen student
    artist neighbor cousin uncle aunt captain pilot singer writer soldier sailor cook guest stranger boy girl man
    woman""".split()
)
ANIMALS: Final = tuple(
    """dog cat horse cow sheep goat pig chicken duck goose rabbit mouse bear wolf fox lion tiger monkey elephant bird
    eagle owl fish shark whale frog snake turtle bee ant butterfly spider deer donkey camel""".split()
)
THINGS: Final = tuple(
    """table chair bed door window wall floor roof key lock lamp candle clock mirror picture book page paper pencil pen
    letter bag box basket bottle cup glass plate bowl spoon fork knife pot pan bread cheese butter egg milk water tea
    coffee juice soup rice meat apple orange lemon banana pear cherry grape potato tomato carrot onion bean corn salt
    sugar cake cookie candy hat coat shirt shoe sock glove scarf dress ring watch phone radio camera computer screen
    machine engine wheel car truck bus train boat ship plane bicycle bridge road street ticket map coin money gift toy
    ball doll drum guitar piano violin song story game stone brick rope nail hammer shovel ladder blanket pillow towel
    soap brush comb needle thread button flower tree leaf branch root seed grass bush rose garden fence gate bench
    fire smoke ice snow rain cloud wind storm thunder shadow light sun moon star sky flag bell robot model voice sound
    word sentence question answer number name""".split()
)
PLACES: Final = tuple(
    """house kitchen school church office market shop store bank hospital library museum theater station airport harbor
    village town city farm field forest mountain hill valley river lake ocean beach island desert cave castle tower
    park street corner room hall cellar yard barn stable factory camp""".split()
)
ADJECTIVES: Final = tuple(
    """red green blue yellow white black brown gray pink purple golden silver big small little large tall short long
    wide narrow thick thin heavy light old young new ancient modern clean dirty wet dry hot cold warm cool soft hard
    smooth rough sharp round square flat empty full open quiet loud bright dark early late quick slow strong weak happy
    sad angry calm brave shy kind clever foolish funny serious gentle careful lazy busy hungry thirsty tired sleepy
    healthy sick rich poor cheap simple strange famous secret broken beautiful ugly lovely pretty perfect wonderful
    terrible dangerous safe fresh sweet sour bitter""".split()
)
VERBS: Final = tuple(
    """see hear find watch follow carry bring take keep hold drop push pull open close clean wash paint build break fix
    move lift turn touch catch throw count buy sell lose draw hide show send cover visit remember forget like love
    want need know choose borrow return use check measure""".split()
)
MOTIONS: Final = tuple(
    """walk run jump swim fly climb sit stand sleep rest wait work play sing dance laugh cry smile talk speak whisper
    shout listen read write cook eat drink learn think dream travel ride sail fish hunt dig grow fall stay live hurry
    wander arrive leave""".split()
)
PASTS: Final = tuple(
    """saw heard found watched followed carried brought took kept held dropped pushed pulled opened closed cleaned
    washed painted built broke fixed moved lifted turned touched caught threw counted bought sold lost drew hid showed
    sent covered visited remembered forgot liked loved wanted needed knew chose borrowed returned used checked
    measured""".split()
)
MOVED: Final = tuple(
    """walked ran jumped swam flew climbed sat stood slept rested waited worked played sang danced laughed cried smiled
    talked spoke whispered shouted listened read wrote cooked ate drank learned dreamed traveled rode sailed fell stayed
    lived hurried wandered arrived left""".split()
)
ADVERBS: Final = tuple(
    """slowly quickly quietly loudly carefully gently happily sadly early late again often always never sometimes soon
    today tomorrow tonight now here there together alone outside inside well""".split()
)
TIMES: Final = tuple(
    """monday tuesday wednesday thursday friday saturday sunday january february march april may june july august
    september october november december spring summer autumn winter morning noon evening night midnight""".split()
)
NUMBERS: Final = tuple(
    """one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand""".split()
)
SMALL: Final = tuple(
    """a an the this that these those my your his her its our their i you he she it we they me him them us and or but
    if when because while after before until than as not no yes please thank hello hi goodbye sorry of in on at by for
    with from to into over under behind between near above below across through around about against without is are was
    were be been am do does did have has had can could will would should must may might what where who why how which
    there here very too so only also just more most some many few all every each other another same both first second
    third last next good better best bad worse right wrong left up down out off back away one thing time day week month
    year way life world hand head eye face heart foot arm leg mouth ear hair voice family home part place end side
    problem idea reason test example minute hour second question help""".split()
)
GREETINGS: Final = (
    "hello there",
    "hello",
    "good morning",
    "good evening",
    "good night",
    "thank you",
    "thank you very much",
    "welcome",
    "welcome back",
    "how are you",
    "how are you today",
    "nice to meet you",
    "see you soon",
    "see you tomorrow",
    "excuse me",
    "i am sorry",
    "yes please",
    "no thank you",
    "of course",
    "have a nice day",
    "this is a test",
    "i am a small model",
    "i can speak",
    "can you hear me",
    "what is your name",
    "my name is robot",
    "where are you going",
    "what time is it",
    "i do not know",
    "i understand",
    "the system is ready",
    "everything is fine",
    "please wait a moment",
    "we are ready",
)
