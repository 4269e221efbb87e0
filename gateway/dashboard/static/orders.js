// What an operator orders: asked for once more, sent with the key, and answered in words.

import { element, find, setText } from "./dom.js";
import { milliseconds, short } from "./words.js";

export class Orders {
  #key;
  #onRefused;
  #confirmed = null;
  #dialog = find("confirm");

  constructor(key, onRefused) {
    this.#key = key;
    this.#onRefused = onRefused;
    find("confirm-no").addEventListener("click", () => this.#dialog.close());
    find("confirm-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const confirmed = this.#confirmed;
      this.#dialog.close();
      confirmed?.();
    });
    this.#dialog.addEventListener("close", () => {
      this.#confirmed = null;
    });
  }

  drain(instance) {
    const { id, state } = instance;
    const path = `admin/instances/${encodeURIComponent(id)}/drain`;
    if (state === "draining" || state === "drained") {
      const text = `It gets new requests again. What is moving away arrives; what has not moved stays.`;
      this.#ask(`Undrain ${id}?`, text, "Undrain", () => this.#send("DELETE", path, null, () => `${id} is taken back.`));
      return;
    }
    const text = "It gets no new requests, and what runs there is moved to other instances. It stays so until it is undrained.";
    this.#ask(`Drain ${id}?`, text, "Drain", () => {
      this.#say(`${id} is draining.`);
      this.#send("POST", path, {}, (answer) => drained(id, answer));
    });
  }

  // Without a request: its id is typed in.
  move(request, instances) {
    const destination = find("move-destination");
    const fit = instances.filter((one) => one.plugin && one.state === "ready" && one.id !== request?.instance);
    destination.replaceChildren(...fit.map((one) => element("option", { value: one.id, text: `${one.id}, freeness ${one.freeness_steps?.toFixed(0) ?? "unknown"}` })));
    const input = find("move-request");
    input.value = request?.id ?? "";
    input.readOnly = request !== null;
    input.required = destination.required = true;
    const title = request === null ? "Move a request?" : `Move ${short(request.id)} away from ${request.instance ?? "where it waits"}?`;
    const text = "Its KV cache goes over while it decodes on; its client sees no more than a short pause.";
    const send = () => {
      const order = { request: input.value.trim(), destination: destination.value };
      this.#say(`${short(order.request)} is ordered to move to ${order.destination}.`);
      this.#send("POST", "admin/migrate", order, moved);
    };
    this.#ask(title, text, "Move", send, true);
  }

  #ask(title, text, yes, confirmed, moves = false) {
    setText(find("confirm-title"), title);
    setText(find("confirm-text"), text);
    setText(find("confirm-yes"), yes);
    find("confirm-move").hidden = !moves;
    if (!moves) find("move-request").required = find("move-destination").required = false;
    this.#confirmed = confirmed;
    this.#dialog.showModal();
  }

  async #send(method, path, order, toWords) {
    try {
      const response = await fetch(path, {
        method,
        headers: { authorization: `Bearer ${this.#key()}`, ...(order === null ? {} : { "content-type": "application/json" }) },
        body: order === null ? undefined : JSON.stringify(order),
        credentials: "omit",
      });
      const answer = await response.json();
      if (response.status === 401) this.#onRefused(answer.error?.message ?? "The gateway refuses this key.");
      else if (response.ok) this.#say(toWords(answer));
      else this.#say(answer.error?.message ?? `The gateway answers ${response.status}.`, true);
    } catch (error) {
      this.#say(`The gateway has not answered: ${error.message}.`, true);
    }
  }

  #say(text, isBad = false) {
    const outcome = find("outcome");
    outcome.classList.toggle("bad", isBad);
    setText(outcome, text);
  }
}

function drained(id, answer) {
  const moved = `${answer.moved} moved away`;
  if (answer.empty) return `${id} is empty: ${moved}.`;
  if (!answer.draining) return `${id} was taken back meanwhile: ${moved}.`;
  return `${id} still drains: ${moved}, ${answer.remaining.length} left there.`;
}

function moved(answer) {
  const request = short(answer.request_id);
  if (answer.outcome !== "committed") return `${request} has not moved: ${answer.reason ?? answer.outcome}.`;
  return `${request} has moved from ${answer.source_id} to ${answer.destination_id}: pause ${milliseconds(answer.pause_ms)}, ${answer.blocks_sent} blocks sent.`;
}
