// Puts the parts together: a key, a stream, and what is shown of it.

import { Charts } from "./charts.js";
import { find, setAttribute, setText } from "./dom.js";
import { Instances } from "./instances.js";
import { Orders } from "./orders.js";
import { Stream } from "./stream.js";
import { Journal, Moves, Requests } from "./tables.js";
import { clock, median, number, percentiles, short } from "./words.js";

const STORED = "kvferry.admin-key"; // Of this tab's session; a header can hold nothing but these characters:
const KEY = /^[\x21-\x7e]+$/;

let stream = null;
let newest = { cluster: null, journal: null, requests: null };
let changed = new Set();
let lastMove = { gateway: null, sequence: 0 }; // What has been shown. A gateway that has just begun to speak tells no news.
let lostAt = null;

const charts = new Charts();
const journal = new Journal();
const moves = new Moves();
const orders = new Orders(() => sessionStorage.getItem(STORED) ?? "", refused);
const instances = new Instances((instance) => orders.drain(instance));
const requests = new Requests((request) => orders.move(request, newest.cluster?.instances ?? []));

function look(key) {
  sessionStorage.setItem(STORED, key);
  find("sign-in").hidden = true;
  find("board").hidden = find("forget").hidden = false;
  connection("", "Connecting");
  stream?.stop();
  stream = new Stream("admin/events", key, arrived, stateChanged);
  if (!document.hidden) stream.start();
}

function signIn(why) {
  stream?.stop();
  stream = null;
  sessionStorage.removeItem(STORED);
  find("board").hidden = find("forget").hidden = true;
  find("sign-in").hidden = false;
  find("confirm").close();
  setText(find("sign-in-error"), why);
  connection("", "Not connected");
  find("key").value = "";
  find("key").focus();
}

function refused(why) {
  signIn(why);
}

function stateChanged(state, why) {
  if (state === "refused") {
    refused(why);
  } else if (state === "live") {
    lostAt = null;
    document.body.classList.remove("is-lost");
    connection("live", "Live");
  } else {
    lostAt ??= Date.now();
    document.body.classList.add("is-lost");
    connection("lost", `${why} Shown is how it was at ${clock(lostAt)}. Trying again.`);
  }
}

function connection(className, text) {
  find("connection").className = className;
  setText(find("connection"), text);
}

// Events may come faster than frames: each part is drawn once a frame, as it was last.
function arrived(name, said) {
  if (!(name in newest)) return;
  if (changed.size === 0) requestAnimationFrame(draw);
  newest[name] = said;
  changed.add(name);
}

function draw() {
  const drawn = changed;
  changed = new Set();
  if (drawn.has("cluster")) drawCluster(newest.cluster);
  if (drawn.has("journal")) drawJournal(newest.journal);
  if (drawn.has("requests")) requests.show(newest.requests);
}

function drawCluster(cluster) {
  const { gateway, measured, freeness } = cluster;
  const others = gateway.others.length;
  const words = [`gateway ${short(gateway.id)}${gateway.leading ? ", the leader" : ""}`];
  words.push(others === 0 ? "the only one" : `${others} other${others === 1 ? "" : "s"}`, `version ${gateway.version}`);
  if (!gateway.redis) words.push("Redis does not answer");
  setText(find("gateway"), words.join(" · "));
  setAttribute(find("gateway"), "title", gateway.id);
  const ready = cluster.instances.filter((one) => one.state === "ready").length;
  const sum = (name) => cluster.instances.reduce((total, one) => total + (one[name] ?? 0), 0);
  setText(find("figure-instances"), `${ready} of ${cluster.instances.length}`);
  setText(find("figure-requests"), `${sum("running")} · ${sum("waiting")}`);
  setText(find("figure-waiting"), number(Object.values(gateway.waiting).reduce((total, one) => total + one, 0)));
  setText(find("figure-freeness"), `${number(freeness.mean_steps)} · ${number(freeness.least_steps)}`);
  setText(find("figure-tokens"), number(measured.tokens_per_s));
  setText(find("figure-ttft"), percentiles(measured.ttft_ms));
  setText(find("figure-gap"), percentiles(measured.gap_ms));
  charts.show(cluster, performance.now());
  instances.show(cluster.instances);
}

function drawJournal({ gateway, entries }) {
  for (const entry of entries) entry.key = `${gateway} ${entry.sequence}`;
  journal.show(entries);
  moves.show(entries);
  const moved = entries.filter((entry) => entry.moved !== null);
  const pauses = moved.map((entry) => entry.moved.pause_ms).filter((pause) => typeof pause === "number");
  setText(find("figure-pause"), `${number(pauses[0] ?? null, 1)} · ${number(median(pauses), 1)}`);
  if (lastMove.gateway === gateway) {
    for (const entry of moved) if (entry.sequence > lastMove.sequence) instances.fly(entry.moved);
  }
  lastMove = { gateway, sequence: Math.max(0, ...moved.map((entry) => entry.sequence)) };
}

find("sign-in-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = find("key").value.trim();
  if (KEY.test(key)) look(key);
  else signIn("That cannot be a key: it has characters that no header can hold.");
});
find("forget").addEventListener("click", () => signIn(""));
find("move-any").addEventListener("click", () => orders.move(null, newest.cluster?.instances ?? []));
// Who does not look costs nothing.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) stream?.stop();
  else stream?.start();
});

const stored = sessionStorage.getItem(STORED);
if (stored === null) signIn("");
else look(stored);
