// Elements, numbers and text. Text of a model reaches the document through text nodes alone.

const SVG = 'http://www.w3.org/2000/svg';
const byId = id => document.getElementById(id);

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === 'on') Object.entries(value).forEach(([event, listener]) => node.addEventListener(event, listener));
    else if (value === true) node.setAttribute(name, '');
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.filter(child => child != null));
  return node;
}

const el = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  filled(document.createElementNS(SVG, tag), attributes, children.map(c => (typeof c === 'string' ? new Text(c) : c)));

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Three significant digits, with a true minus sign.
function number(value) {
  if (value == null || !Number.isFinite(value)) return '–';
  const size = Math.abs(value);
  let text;
  if (size >= 1000) text = Math.round(value).toLocaleString('en-US').replace(/,/g, '\u202f');
  else if (size !== 0 && size < 0.001) text = value.toExponential(1);
  else text = String(Number(value.toPrecision(3)));
  return text.replace('-', '\u2212');
}

const signed = value => (value > 0 ? '+' : '') + number(value);
const plural = (n, noun) => `${n} ${noun}${n === 1 ? '' : 's'}`;
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

// Round numbers between low and high, about n of them.
function ticks(low, high, n) {
  const raw = (high - low || 1) / n;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find(factor => raw / power <= factor * 1.0001);
  const first = Math.ceil(low / step - 1e-9);
  // Counted: where numbers are so large that one more changes nothing, a loop up to `high` would not end.
  const found = Array.from({ length: n + 2 }, (_, i) => (first + i) * step).filter(value => value <= high + step * 1e-9);
  return found.map(value => Number(value.toPrecision(12)));
}

const stepTicks = (low, high, n) => ticks(low, high, n).filter(Number.isInteger);

// What a reader cannot see but a program obeys: control and format characters (bidirectional overrides, invisible tags),
// separators, halves of surrogate pairs. Joiners inside words and emoji belong to the writing and stay.
const UNSEEN = /(?<![\p{L}\p{M}\p{Extended_Pictographic}\u{fe0f}\u{1f3fb}-\u{1f3ff}])[\u200c\u200d]|(?![\n\t\u200c\u200d])[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Cs}\p{Co}]/gu;

const codePoint = character => 'U+' + character.codePointAt(0).toString(16).toUpperCase().padStart(4, '0');

// Text as nodes; what cannot be seen is written as its code point, set apart so that it is not mistaken for text.
function visible(text) {
  const fragment = document.createDocumentFragment();
  let start = 0;
  for (const match of text.matchAll(UNSEEN)) {
    if (match.index > start) fragment.append(text.slice(start, match.index));
    fragment.append(el('span', { class: 'unseen', title: 'a character that cannot be seen' }, codePoint(match[0])));
    start = match.index + match[0].length;
  }
  if (start < text.length) fragment.append(text.slice(start));
  return fragment;
}

// The same as one string, for labels and list entries.
const visibleString = text => String(text).replace(UNSEEN, codePoint);
