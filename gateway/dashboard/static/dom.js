// The few things that every part of the page does with elements. Nothing is ever made from text that came from outside.

export const find = (id) => document.getElementById(id);

export function element(name, { className, text, ...properties } = {}, ...children) {
  const made = document.createElement(name);
  if (className !== undefined) made.className = className;
  if (text !== undefined) made.textContent = text;
  Object.assign(made, properties);
  made.append(...children);
  return made;
}

// Writing what is there already would cost a layout all the same.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

export function setStyle(node, name, value) {
  if (node.style[name] !== value) node.style[name] = value;
}

// One element for each item, in the items' order; elements are made once, and keep focus and scroll position.
export class Keyed {
  #container;
  #make;
  #entries = new Map();

  constructor(container, make) {
    this.#container = container;
    this.#make = make;
  }

  get(key) {
    return this.#entries.get(key);
  }

  show(items, keyOf) {
    const wanted = new Set(items.map(keyOf));
    for (const [key, entry] of this.#entries) {
      if (!wanted.has(key)) {
        entry.node.remove();
        this.#entries.delete(key);
      }
    }
    let place = this.#container.firstElementChild;
    for (const item of items) {
      const key = keyOf(item);
      let entry = this.#entries.get(key);
      if (entry === undefined) {
        entry = this.#make(item);
        this.#entries.set(key, entry);
      }
      entry.update(item);
      if (entry.node === place) place = place.nextElementSibling;
      else this.#container.insertBefore(entry.node, place);
    }
  }
}
