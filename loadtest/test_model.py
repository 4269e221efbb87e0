"""Make the test model: a tiny LLaMA with random weights and its tokenizer, without any download.

    python -m loadtest.test_model [DIRECTORY]    # a DIRECTORY named kvferry-bench gets the model of the benchmarks

The weights come from a fixed seed, so every machine makes the same model. They are drawn wide (``INITIALIZER_RANGE``):
with the usual 0.02 such a model repeats one token for ever, and a broken migration would still produce equal output.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL_NAME = "kvferry-test"
MODEL_DIRECTORY = Path(".cache/models") / MODEL_NAME

SEED = 20241024
INITIALIZER_RANGE = 0.2


@dataclass(frozen=True, slots=True)
class Shape:
    """What a model's cost follows from."""

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_size: int
    positions_max: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values, in float32."""
        return self.layers * 2 * self.kv_heads * self.head_size * 4


TEST_SHAPE = Shape(layers=4, hidden_size=128, heads=4, kv_heads=2, head_size=32, positions_max=32_768)
BENCH_SHAPE = Shape(layers=4, hidden_size=128, heads=4, kv_heads=4, head_size=128, positions_max=34_816)
"""KV heavy, compute light: 16 KiB of KV a token, and no more query heads than that takes."""
BENCH_MODEL_DIRECTORY = Path(".cache/models/kvferry-bench")

BEGIN, END, TURN, PAD = "<|begin|>", "<|end|>", "<|turn|>", "<|pad|>"
SPECIAL_TOKENS = [BEGIN, END, TURN, PAD]
MARKUP = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
"""What vLLM's reasoning and tool parsers look for. The model makes them only when a ``logit_bias`` wants it to."""

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)

WORDS = """
a about above across act add after again against age ago air all almost alone along already also always among amount
and animal another answer any appear apple area arm around arrive art as ask at autumn away back bad bag ball bank
base basket be bear beat beautiful because become bed before began begin behind believe bell below beside best better
between beyond big bird black blood blow blue board boat body bone book both bottle bottom bowl box boy branch bread
break bridge bright bring broad broken brother brought brown build burn busy but buy by call came can captain car care
carry case cat catch caught cause cell center certain chair chance change chart check chief child choose circle city
class clean clear climb clock close cloth cloud coast coat cold collect color come common company compare complete
contain continue control cook cool copper copy corn corner cost cotton could count country course cover cross crowd
cry current cut dance danger dark daughter day dead deal dear deep deer describe desert did differ direct discuss
distant do doctor dog door double down draw dream dress drink drive drop dry duck during dust each ear early earth
ease east eat edge egg eight either else empty end energy engine enough enter equal even evening event ever every
exact example except expect eye face fact fair fall family famous far farm fast father favor fear feather feed feel
feet fell felt ferry few field fig fight figure fill final find fine finger finish fire first fish fit five flat floor
flow flower fly follow food foot for force forest form forward found four free fresh friend from front fruit full fun
game garden gas gather gave general gentle get girl give glad glass go goat gold gone good got grand grass gray great
green grew ground group grow guess guide gun had hair half hall hand happen happy harbor hard harvest has hat have he
head hear heart heat heavy help her here high hill him his history hit hold hole home honey hope horse hot hour house
how huge human hundred hunt hurry ice idea if imagine in inch indeed insect instead interest into iron island it ivory
job join journey joy jump just keep kettle key kind king kitchen knew know ladder lady lake lamp land lantern large
last late laugh law lay lead leaf learn least leave led left leg lemon less let letter level lie life lift light like
line linen lion list listen little live load lock log long look lost lot loud love low machine made magic main make
man many map maple marble march mark market master match material may me mean measure meet melody men metal method
middle might mile milk mind mine mirror miss mist modern moment money month moon more morning most mother mountain
mouth move much music must my name narrow nation nature near neck need needle neighbor nest never new next night nine
no noise noon north nose note nothing notice noun now number oak object ocean odd of off offer office often oil old
olive on once one only onion open or orange orchard order other our out over own page paint pair palace paper parent
part party pass past path pay peace pear pebble people pepper perhaps person phrase piano pick picture piece pine
pitch place plain plan plane planet plant play please plum pocket poem point pond poor port pose position possible
post pound power prepare present press pretty problem process produce promise proper protect proud prove pull pump
push put queen question quick quiet quilt quite rabbit race radio rain raise ran rather reach read ready real reason
receive record red remember repeat reply rest ribbon rich ride right ring rise river road robin rock roll room root
rope rose round row rule run sad safe said sail salt same sand save saw say scale school science sea search season
seat second secret see seed seem select sell send sense sentence settle seven several shade shall shape share sharp
she shell shine ship shirt shoe shop shore short should shoulder shout show side sign silence silver similar simple
since sing sister sit six size skill skin sky sleep slow small smell smile smoke snow so soap soft soil soldier solve
some son song soon sound soup south space sparrow speak special speed spell spend spoke spoon spread spring square
stand star start state station stay steam steel step still stone stood stop store storm story straight strange stream
street strong student study subject such sudden sugar suit summer sun supply support sure surface surprise swallow
sweet swim table tail take talk tall teach team tell temple ten tent term test than thank that the their them then
there these they thick thin thing think third this those though thought thousand thread three through thunder tie
timber time tiny to together told tomato tone too took tool top total touch toward tower town trade train travel tree
triangle trip trouble truck true trust try tulip tune turn twelve twenty two type under unit until up upon us use
usual valley value velvet vessel view village violet visit voice vowel wagon wait walk wall walnut want war warm was
wash watch water wave way we wear weather week weight well went were west what wheat wheel when where whether which
while whisper white who whole why wide wild will willow win wind window wing winter wish with woman wonder wood wool
word work world would write written wrong yard year yellow yes yet you young your
""".split()
ENDINGS = ["s", "ed", "ing", "er", "ly", "ness", "ful", "less", "user", "assistant", "system"]
"""Pieces without a leading space, next to the short words."""
MARKS = [
    " ",
    "\n",
    "\n\n",
    ",",
    ".",
    "!",
    "?",
    ":",
    ";",
    " -",
    " (",
    ")",
    ' "',
    '"',
    "'s",
    "...",
    " 1",
    " 2",
    " 10",
    " 365",
]
CHARACTERS = [" é", " ñ", " ü", " 水", " 山", " 海", " €", " ✓", " →", " 🙂"]
"""Whole characters beyond ASCII. The lone bytes in the vocabulary also yield characters that never become complete."""


def build_tokenizer(positions_max: int) -> Any:
    """A byte-level tokenizer whose tokens are whole words with their leading space: random output reads as text.

    ``ignore_merges`` takes a word that is in the vocabulary as one token; anything else falls back to its bytes.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)

    def spelled(piece: str) -> str:
        """The piece in the byte-level alphabet (a space is written as Ġ)."""
        return "".join(part for part, _ in pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(piece))

    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    for word in WORDS:
        pieces += [spelled(f" {word}"), spelled(f" {word.capitalize()}")]
        if len(word) <= 3:
            pieces.append(spelled(word))
    pieces += [spelled(piece) for piece in ENDINGS + MARKS + CHARACTERS]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(SPECIAL_TOKENS + pieces + MARKUP))}

    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS + MARKUP)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[TURN, *MARKUP],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=positions_max,
    )


def build_model(tokenizer: Any, shape: Shape) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=2 * shape.hidden_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        max_position_embeddings=shape.positions_max,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = LlamaForCausalLM(config).to(torch.float32)
    # A row of zeros keeps a token out of the output: markup other than the end token, and control characters, which
    # would upset a terminal. Lone bytes beyond ASCII stay, but seldom: they make the detokenizer hold text back.
    with torch.no_grad():
        for token in (BEGIN, TURN, PAD, *MARKUP):
            model.lm_head.weight[tokenizer.convert_tokens_to_ids(token)] = 0
        for token, index in tokenizer.get_vocab().items():
            text = tokenizer.convert_tokens_to_string([token])
            if text == "\x7f" or (len(text) == 1 and text < " " and text != "\n"):
                model.lm_head.weight[index] = 0
            elif text == "\ufffd":
                model.lm_head.weight[index] *= 0.8
    return model


def make_test_model(directory: Path = MODEL_DIRECTORY, shape: Shape = TEST_SHAPE) -> Path:
    """Write the model to ``directory``, all or nothing, and return the directory."""
    tokenizer = build_tokenizer(shape.positions_max)
    model = build_model(tokenizer, shape)
    unfinished = directory.with_name(directory.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    # Without this file vLLM would take sampling defaults from the one that transformers writes.
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    (unfinished / "generation_config.json").write_text(json.dumps(ids) + "\n")
    shutil.rmtree(directory, ignore_errors=True)
    unfinished.rename(directory)
    return directory


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else MODEL_DIRECTORY
    target_shape = BENCH_SHAPE if target.name == BENCH_MODEL_DIRECTORY.name else TEST_SHAPE
    print(f"made the model in {make_test_model(target, target_shape)}", flush=True)
