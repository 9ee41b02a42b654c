// Elements out of names, attributes and text. Whatever comes from the network goes through here as text or as an
// attribute that holds text, never as markup: the page's Content-Security-Policy refuses markup made of strings.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

/** An HTML element; `onclick` and the like are listeners. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Sets the text of `node` where it is another one, so that selections and screen readers are left alone. */
export function put(node, text) {
  const wanted = String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

/** Sets an attribute where it is another one; null removes it. */
export function mark(node, name, value) {
  if (value === null || value === undefined || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

/** The child of `parent` for `key`, made by `make` the first time; `keep` drops those of other keys and sorts. */
export class Keyed {
  constructor(parent) {
    this.parent = parent;
    this.nodes = new Map();
  }

  /** Shows one node for each item, in their order. `update(node, item, index)` is called for each. */
  show(items, keyOf, make, update) {
    const keys = new Set(items.map(keyOf));
    for (const [key, node] of this.nodes) {
      if (!keys.has(key)) {
        node.remove();
        this.nodes.delete(key);
      }
    }
    items.forEach((item, index) => {
      const key = keyOf(item);
      if (!this.nodes.has(key)) this.nodes.set(key, make(item));
      const node = this.nodes.get(key);
      if (this.parent.children[index] !== node) this.parent.insertBefore(node, this.parent.children[index] ?? null);
      update(node, item, index);
    });
  }
}
