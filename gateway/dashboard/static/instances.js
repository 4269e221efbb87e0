// Each instance as a card with a bar of its blocks, and requests that fly from one card to another.

import { Keyed, element, find, setAttribute, setStyle, setText } from "./dom.js";
import { number, short } from "./words.js";

const CLASSES = ["high", "normal", "low"];
const FEW = 6;
const FLIGHTS_MAX = 24;
const FLIGHT_MS = 1400;
const still = matchMedia("(prefers-reduced-motion: reduce)");

export class Instances {
  #cards;
  #flights = find("flights");

  constructor(onDrain) {
    this.#cards = new Keyed(find("cards"), (instance) => card(instance, onDrain));
  }

  show(instances) {
    find("no-instances").hidden = instances.length > 0;
    find("cards").classList.toggle("few", instances.length <= FEW);
    this.#cards.show(instances, (instance) => instance.id);
  }

  // From card to card, or a frame around both for those who want no motion.
  fly(move) {
    const source = this.#cards.get(move.source)?.node;
    const destination = this.#cards.get(move.destination)?.node;
    if (source === undefined || destination === undefined) return;
    for (const one of [source, destination]) {
      one.classList.add("touched");
      setTimeout(() => one.classList.remove("touched"), FLIGHT_MS);
    }
    if (still.matches || this.#flights.childElementCount >= FLIGHTS_MAX) return;
    const ground = this.#flights.getBoundingClientRect();
    const [from, to] = [source, destination].map((one) => {
      const place = one.querySelector(".bar").getBoundingClientRect();
      return `translate(${place.left - ground.left + place.width / 2 - 30}px, ${place.top - ground.top - 2}px)`;
    });
    const flying = element("span", { text: short(move.request) });
    this.#flights.append(flying);
    const animation = flying.animate([{ transform: from }, { transform: to }], { duration: FLIGHT_MS, easing: "ease-in-out", fill: "forwards" });
    animation.onfinish = animation.oncancel = () => flying.remove();
  }
}

function card(first, onDrain) {
  const bar = element("div", { className: "bar" });
  bar.setAttribute("role", "img");
  const segments = Object.fromEntries(["low", "normal", "high", "reserved", "head"].map((name) => [name, element("span", { className: name })]));
  bar.append(...Object.values(segments));
  const names = ["freeness", "batch", "waiting", "step", "moving", "note"];
  const facts = Object.fromEntries(names.map((name) => [name, element("span", { className: name })]));
  const state = element("span", { className: "state" });
  const button = element("button", { type: "button" });
  let instance = first;
  button.addEventListener("click", () => onDrain(instance));
  const top = element("div", { className: "top" }, element("h3", { text: first.id, title: first.id }), state, button);
  const node = element("li", {}, top, bar, element("p", { className: "facts" }, ...Object.values(facts)));

  function update(newest) {
    instance = newest;
    setAttribute(node, "data-state", instance.state);
    setText(state, instance.state);
    showButton(button, instance);
    showBar(bar, segments, instance);
    showFacts(facts, instance);
  }
  return { node, update };
}

function showButton(button, instance) {
  const undoes = instance.state === "draining" || instance.state === "drained";
  setText(button, undoes ? "Undrain" : "Drain");
  setAttribute(button, "aria-label", `${undoes ? "Undrain" : "Drain"} ${instance.id}`);
  if (button.hidden === instance.plugin) button.hidden = !instance.plugin;
}

// What runs is shared out by how many requests of each class run: an instance does not say how many blocks each class has.
function showBar(bar, segments, instance) {
  const total = instance.blocks_total ?? 0;
  const used = instance.blocks_used ?? 0;
  const byClass = instance.running_by_class ?? {};
  const running = CLASSES.reduce((sum, name) => sum + (byClass[name] ?? 0), 0);
  const share = (blocks) => (total > 0 ? Math.min(1, blocks / total) : 0);
  let end = 0;
  const ends = {};
  for (const name of CLASSES) {
    end += running > 0 ? (used * (byClass[name] ?? 0)) / running : name === "normal" ? used : 0;
    ends[name] = end;
  }
  // Each reaches from the left edge to its end, and what comes earlier lies above it: no layout, only compositing.
  for (const name of CLASSES) setStyle(segments[name], "transform", `scaleX(${share(ends[name]).toFixed(4)})`);
  const reserved = instance.blocks_reserved ?? 0;
  const head = instance.head_of_line_blocks ?? 0;
  place(segments.reserved, share(used), share(reserved));
  place(segments.head, share(used + reserved), share(head));
  const free = Math.max(0, total - used - reserved);
  const classes = CLASSES.filter((name) => byClass[name]).map((name) => `${byClass[name]} ${name}`);
  const parts = [`${used} of ${total} blocks used${classes.length ? ` by ${classes.join(", ")}` : ""}`, `${reserved} reserved`, `${free} free`];
  if (head > 0) parts.push(`head of line waits for ${head}`);
  setAttribute(bar, "aria-label", parts.join("; "));
  setAttribute(bar, "title", parts.join("; "));
}

function place(segment, left, width) {
  setStyle(segment, "left", `${(left * 100).toFixed(2)}%`);
  setStyle(segment, "width", `${(Math.min(width, 1 - left) * 100).toFixed(2)}%`);
}

function showFacts(facts, instance) {
  const known = instance.running !== undefined;
  setText(facts.freeness, instance.freeness_steps === undefined ? "" : `freeness ${number(instance.freeness_steps)}`);
  setText(facts.batch, known ? `batch ${instance.running}${instance.running_max ? `/${instance.running_max}` : ""}` : "");
  setText(facts.waiting, known ? `${instance.waiting} waiting` : "");
  setText(facts.step, instance.step_ms === undefined ? "" : `step ${number(instance.step_ms, 1)} ms`);
  const moving = [instance.migrations_in ? `${instance.migrations_in} coming` : "", instance.migrations_out ? `${instance.migrations_out} leaving` : ""];
  setText(facts.moving, moving.filter(Boolean).join(", "));
  setText(facts.note, instance.reason ?? (instance.plugin ? "" : "without the plugin"));
}
