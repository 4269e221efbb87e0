// The one stream of server-sent events. With fetch and not EventSource, which could not send the key as a header.

const FIRST_WAIT_MS = 300;
const LONGEST_WAIT_MS = 5000;
const SILENCE_MS = 15000; // The gateway says something every 5 s.
const UNREAD_MAX = 32 * 1024 * 1024;

export class Refused extends Error {}

export class Stream {
  #url;
  #key;
  #onEvent;
  #onState;
  #aborting = null;
  #run = 0; // Each start has a number: what an older one still does counts for nothing.

  constructor(url, key, onEvent, onState) {
    this.#url = url;
    this.#key = key;
    this.#onEvent = onEvent;
    this.#onState = onState;
  }

  start() {
    this.stop();
    this.#loop(this.#run);
  }

  stop() {
    this.#run += 1;
    this.#aborting?.abort();
  }

  async #loop(run) {
    let waitMs = FIRST_WAIT_MS;
    while (run === this.#run) {
      let why = "The stream has ended.";
      try {
        await this.#read(run, () => {
          waitMs = FIRST_WAIT_MS;
        });
      } catch (error) {
        if (run !== this.#run) return;
        if (error instanceof Refused) {
          this.#onState("refused", error.message);
          return;
        }
        why = error instanceof TypeError || error.name === "AbortError" ? "The gateway does not answer." : error.message;
      }
      if (run !== this.#run) return;
      this.#onState("lost", why);
      await new Promise((resolve) => setTimeout(resolve, waitMs));
      waitMs = Math.min(waitMs * 2, LONGEST_WAIT_MS);
    }
  }

  async #read(run, arrived) {
    const aborting = (this.#aborting = new AbortController());
    let silence;
    const heard = () => {
      clearTimeout(silence);
      silence = setTimeout(() => aborting.abort(), SILENCE_MS);
    };
    heard();
    try {
      const response = await fetch(this.#url, {
        headers: { authorization: `Bearer ${this.#key}` },
        cache: "no-store",
        credentials: "omit",
        signal: aborting.signal,
      });
      if (response.status === 401) throw new Refused("The gateway refuses this key.");
      if (!response.ok) throw new Error(`The gateway answers ${response.status}.`);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let unread = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done || run !== this.#run) return;
        heard();
        const blocks = (unread + value).split("\n\n");
        unread = blocks.pop();
        if (unread.length > UNREAD_MAX) throw new Error("An event is too large.");
        for (const block of blocks) {
          const event = parse(block);
          if (event !== null) {
            arrived();
            this.#onState("live", "");
            this.#onEvent(event.name, JSON.parse(event.data));
          }
        }
      }
    } finally {
      clearTimeout(silence);
      aborting.abort();
    }
  }
}

function parse(block) {
  const event = { name: "message", data: "" };
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) event.name = line.slice(7);
    else if (line.startsWith("data: ")) event.data += line.slice(6);
  }
  return event.data === "" ? null : event;
}
