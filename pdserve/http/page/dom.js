// Creates elements from names, attributes and text. Data from the network becomes text or attribute values, never markup:
// the page's Content-Security-Policy refuses markup from strings.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

/** Creates an HTML element; attributes such as `onclick` are listeners. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Creates an SVG element. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Sets the text of `node` if it differs, so that selections and screen readers are not disturbed. */
export function put(node, text) {
  const wanted = String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

/** Sets an attribute if it differs; null removes the attribute. */
export function mark(node, name, value) {
  if (value === null || value === undefined || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

/** Children of `parent` by key, which are reused between calls of `show`. */
export class Keyed {
  constructor(parent) {
    this.parent = parent;
    this.nodes = new Map();
  }

  /** Shows one node for each item, in order. `make(item)` creates missing nodes; `update(node, item, index)` is called
   * for each. Nodes of other keys are removed. */
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
