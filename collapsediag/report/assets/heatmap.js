// The matrix of a scored step: every trace (rows) under every prompt (columns), as pointwise MI.
// The colours mean the same at every step, so that a collapsed matrix looks empty and not vivid.

const COLOURS = {
  light: { below: [228, 196, 150], zero: [247, 246, 243], above: [8, 61, 119], missing: [190, 190, 186], frame: '#3a3a38' },
  dark: { below: [78, 65, 47], zero: [34, 37, 41], above: [126, 192, 255], missing: [90, 92, 95], frame: '#d0cdc6' },
};
const MAX_HEIGHT = 520;
const MIN_FRAMED = 5;

const isDark = () => !isPrinting && (document.documentElement.dataset.theme ?? (matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light')) === 'dark';
let isPrinting = false;

// Colour of each level 0 to 255, as the 32-bit numbers of an image.
function palette() {
  const colours = COLOURS[isDark() ? 'dark' : 'light'];
  const table = new Uint8ClampedArray(256 * 4);
  for (let level = 0; level < 256; level++) {
    const share = (level - 128) / 127;
    const full = share < 0 ? colours.below : colours.above;
    const colour = level === 0 ? colours.missing : colours.zero.map((zero, i) => zero + Math.abs(share) * (full[i] - zero));
    table.set([...colour, 255], level * 4);
  }
  return new Uint32Array(table.buffer);
}

class Heatmap {
  constructor() {
    this.figure = byId('matrix');
    this.canvas = el('canvas', { tabindex: 0, role: 'img', 'aria-label': 'Matrix of traces and prompts; arrow keys up and down choose a trace.' });
    this.row = el('div', { class: 'row-mark' });
    this.holder = el('div', { class: 'cells' }, this.canvas, this.row);
    this.bar = el('canvas', { class: 'bar', width: 1, height: 255, 'aria-hidden': 'true' });
    this.high = el('span');
    this.low = el('span');
    const scale = el('div', { class: 'scale', 'aria-hidden': 'true' }, this.high, this.bar, this.low);
    this.told = el('p', { class: 'told' });
    this.note = el('p', { class: 'note' });
    this.why = el('p', { class: 'why' });
    this.body = el('div', { class: 'heat' }, this.holder, scale);
    const title = el('h3', {}, 'Every trace under every prompt: ', el('em', {}, 'bad when the diagonal fades'));
    this.figure.replaceChildren(title, this.told, this.body, this.why, this.note);
    this.listen();
  }

  // matrix: a draw of a scored step, or {missing}.
  show(matrix) {
    this.matrix = matrix.levels ? matrix : null;
    this.body.hidden = !this.matrix;
    this.why.hidden = Boolean(this.matrix);
    if (!this.matrix) {
      setText(this.why, `Not measured, because ${visibleString(matrix.missing)}.`);
      setText(this.told, '');
      setText(this.note, '');
      return;
    }
    const { n_rows: rows, n_columns: columns, n_traces: total, n_left_out: lost, range } = matrix;
    this.canvas.setAttribute('aria-label', `Matrix of ${rows} traces and ${columns} prompts; arrow keys up and down choose a trace.`);
    setText(this.high, `+${number(range)}`);
    setText(this.low, `\u2212${number(range)}`);
    const drawn = rows < total - lost ? ` ${rows} of ${total - lost} traces are drawn.` : '';
    const left = lost ? ` ${plural(lost, 'trace')} left out: empty or not finite.` : '';
    setText(this.note, `${rows} traces (down, grouped by their own prompt, framed) under ${columns} prompts (across): log p(trace|prompt) \u2212 log p(trace), in nats. Colours end at \u00b1log P at every step.${drawn}${left}`);
    this.paint();
    this.tell(null);
  }

  paint() {
    if (!this.matrix) return;
    const { n_rows: rows, n_columns: columns, levels } = this.matrix;
    const colours = palette();
    const image = new ImageData(columns, rows);
    const pixels = new Uint32Array(image.data.buffer);
    for (let i = 0; i < levels.length; i++) pixels[i] = colours[levels[i]];
    this.image ??= document.createElement('canvas');
    this.image.width = columns;
    this.image.height = rows;
    this.image.getContext('2d').putImageData(image, 0, 0);
    const ratio = Math.min(2, devicePixelRatio || 1);
    const width = Math.max(120, this.holder.clientWidth);
    const height = clamp(rows * Math.max(3, Math.round(width / columns / 3)), 160, MAX_HEIGHT);
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    const context = this.canvas.getContext('2d');
    // More rows than pixels must be averaged; cells that are larger than pixels must stay sharp.
    context.imageSmoothingEnabled = rows > this.canvas.height || columns > this.canvas.width;
    context.drawImage(this.image, 0, 0, this.canvas.width, this.canvas.height);
    this.frames(context, ratio);
    this.scaleBar(colours);
    this.markRow();
  }

  // A frame around the cells of each prompt's own traces: the diagonal, where it should be blue.
  frames(context, ratio) {
    const { own, n_rows: rows, n_columns: columns } = this.matrix;
    const [width, height] = [this.canvas.width / columns, this.canvas.height / rows];
    if (width < MIN_FRAMED * ratio) return;
    context.strokeStyle = COLOURS[isDark() ? 'dark' : 'light'].frame;
    context.lineWidth = ratio;
    for (let start = 0; start < rows; ) {
      let end = start;
      while (end < rows && own[end] === own[start]) end++;
      if ((end - start) * height >= MIN_FRAMED * ratio) {
        context.strokeRect(own[start] * width + ratio / 2, start * height + ratio / 2, width - ratio, (end - start) * height - ratio);
      }
      start = end;
    }
  }

  scaleBar(colours) {
    const image = new ImageData(1, 255);
    new Uint32Array(image.data.buffer).set(Array.from({ length: 255 }, (_, i) => colours[255 - i]));
    this.bar.getContext('2d').putImageData(image, 0, 0);
  }

  markRow() {
    const index = this.matrix?.rowIndex.get(state.trace);
    this.row.hidden = index === undefined;
    if (index === undefined) return;
    const height = this.canvas.clientHeight / this.matrix.n_rows;
    this.row.style.top = `${index * height - 1}px`;
    this.row.style.height = `${Math.max(2, height) + 2}px`;
  }

  listen() {
    const at = event => {
      const box = this.canvas.getBoundingClientRect();
      return [
        clamp(Math.floor(((event.clientY - box.top) / box.height) * this.matrix.n_rows), 0, this.matrix.n_rows - 1),
        clamp(Math.floor(((event.clientX - box.left) / box.width) * this.matrix.n_columns), 0, this.matrix.n_columns - 1),
      ];
    };
    this.canvas.addEventListener('pointermove', event => this.tell(at(event)));
    this.canvas.addEventListener('pointerleave', () => this.tell(null));
    this.canvas.addEventListener('click', event => update({ trace: this.matrix.rows[at(event)[0]] }));
    this.canvas.addEventListener('keydown', event => {
      if (event.key !== 'ArrowDown' && event.key !== 'ArrowUp') return;
      event.preventDefault();
      event.stopPropagation();
      const index = (this.matrix.rowIndex.get(state.trace) ?? -1) + (event.key === 'ArrowDown' ? 1 : -1);
      update({ trace: this.matrix.rows[clamp(index, 0, this.matrix.n_rows - 1)] });
    });
  }

  tell(place) {
    if (!place) {
      setText(this.told, `step ${state.step}   point at a cell for its value, click to read the trace`);
      return;
    }
    const [index, column] = place;
    const { rows, own } = this.matrix;
    const value = cell(this.matrix, index, column);
    const here = column === own[index] ? 'its own prompt' : `prompt ${column} (its own is ${own[index]})`;
    setText(this.told, `trace ${rows[index]} under ${here}   ${value === null ? 'not scored' : `${signed(value)} nats`}`);
  }
}
