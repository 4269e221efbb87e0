// Decisions, moves and requests.

import { Keyed, element, find, setAttribute, setText } from "./dom.js";
import { clock, milliseconds, short } from "./words.js";

const JOURNAL_SHOWN_MAX = 100;
const MOVES_SHOWN_MAX = 50;

export class Journal {
  #entries = new Keyed(find("journal"), (entry) => {
    const by = entry.gateway === null ? "" : ` (seen by gateway ${short(entry.gateway)})`;
    const node = element(
      "li",
      {},
      element("time", { text: clock(entry.at_ms), dateTime: new Date(entry.at_ms).toISOString() }),
      element("span", { className: "kind", text: entry.kind }),
      element("span", { text: entry.text + by }),
    );
    return { node, update() {} };
  });

  show(entries) {
    const shown = entries.slice(0, JOURNAL_SHOWN_MAX);
    find("no-journal").hidden = shown.length > 0;
    this.#entries.show(shown, (entry) => entry.key);
  }
}

export class Moves {
  #rows = new Keyed(find("moves"), (entry) => {
    const move = entry.moved;
    const cells = [clock(entry.at_ms), short(move.request), move.source, move.destination, String(move.output_tokens), milliseconds(move.pause_ms), milliseconds(move.token_gap_ms)];
    const node = element("tr", {}, ...cells.map((text) => element("td", { text, title: text })));
    return { node, update() {} };
  });

  show(entries) {
    const shown = entries.filter((entry) => entry.moved !== null).slice(0, MOVES_SHOWN_MAX);
    find("no-moves").hidden = shown.length > 0;
    this.#rows.show(shown, (entry) => entry.key);
  }
}

export class Requests {
  #rows;
  #newest = null;

  constructor(onMove) {
    this.#rows = new Keyed(find("requests"), (request) => row(request, onMove));
    find("filter").addEventListener("input", () => this.#draw());
  }

  show(requests) {
    this.#newest = requests;
    this.#draw();
  }

  #draw() {
    if (this.#newest === null) return;
    const { requests, running, silent } = this.#newest;
    const wanted = find("filter").value.trim().toLowerCase();
    const shown = requests.filter((one) => wanted === "" || [one.id, one.model, one.instance].some((word) => (word ?? "").toLowerCase().includes(wanted)));
    find("no-requests").hidden = shown.length > 0;
    const quiet = silent.length ? `; ${silent.length} of the other gateways did not answer` : "";
    setText(find("requests-shown"), `${shown.length} of ${running} shown${quiet}`);
    this.#rows.show(shown, (one) => one.id);
  }
}

function row(first, onMove) {
  let request = first;
  const cells = Array.from({ length: 7 }, () => element("td"));
  const button = element("button", { type: "button", text: "Move…" });
  button.setAttribute("aria-label", `Move request ${first.id}`);
  button.addEventListener("click", () => onMove(request));
  const node = element("tr", {}, ...cells, element("td", {}, button));
  function update(newest) {
    request = newest;
    const texts = [short(request.id), request.model ?? "–", request.instance ?? "waits", String(request.output_tokens), String(request.moves), `${request.age_s} s`, short(request.gateway)];
    texts.forEach((text, index) => setText(cells[index], text));
    setAttribute(cells[0], "title", request.id);
  }
  return { node, update };
}
