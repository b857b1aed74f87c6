// The page put together: controls, keys, the scored step that is shown, and news from a live run.

const POLL_MILLISECONDS = 3000;
const PLAY_MILLISECONDS = 350;
let heatmap;
let reader;
let playing = null;

async function showScored() {
  const steps = run().shownSteps;
  if (state.step === null) {
    const known = run().reasons[withDraw('{draw}retrieval_accuracy')];
    showNothing(known ?? (page.live ? 'no step has been scored yet' : 'no step of this run was scored'));
    return;
  }
  const asked = `${state.run}/${state.step}/${state.draw}`;
  let scored;
  try {
    scored = await scoredStep(run(), state.step);
  } catch (error) {
    showNothing(`step ${state.step} could not be loaded (${error.message})`);
    return;
  }
  // The reader may have moved on while this step was unpacked.
  if (asked !== `${state.run}/${state.step}/${state.draw}`) return;
  heatmap.show(scored.draws[state.draw] ?? { missing: `step ${state.step} was not scored in this draw of turns` });
  reader.show(scored);
  heatmap.markRow();
  const index = steps.indexOf(state.step);
  for (const near of [steps[index + 1], steps[index - 1]]) if (near !== undefined) scoredStep(run(), near).catch(() => {});
}

function showNothing(reason) {
  heatmap.show({ missing: reason });
  reader.show({ draws: {}, contexts: [], traces: [] });
}

function controls() {
  const slider = byId('slider');
  slider.addEventListener('input', () => update({ step: run().shownSteps[Number(slider.value)] }));
  byId('earlier').addEventListener('click', () => moveStep(-1));
  byId('later').addEventListener('click', () => moveStep(1));
  byId('play').addEventListener('click', play);
  byId('reset').addEventListener('click', () => update({ zoom: null }));
  byId('theme').addEventListener('click', changeTheme);
  byId('keys').addEventListener('click', () => byId('help').showModal());
  byId('close').addEventListener('click', () => byId('help').close());
  byId('draw').addEventListener('change', event => update({ draw: event.target.value }));
  byId('run').addEventListener('change', event => chooseRun(Number(event.target.value)));
  on(['step', 'run', 'draw', 'zoom'], showControls);
  showControls();
}

function showControls() {
  const steps = run().shownSteps;
  const slider = byId('slider');
  slider.max = Math.max(0, steps.length - 1);
  slider.value = Math.max(0, steps.indexOf(state.step));
  slider.disabled = steps.length < 2;
  slider.setAttribute('aria-valuetext', state.step === null ? 'no scored step' : `step ${state.step}`);
  setText(byId('step'), state.step === null ? 'no scored step' : `step ${number(state.step)}`);
  const held = run().scored_steps.length;
  setText(byId('held'), held > steps.length ? `${steps.length} of ${held} scored steps are in this page; the run folder has all` : '');
  byId('reset').disabled = !state.zoom;
  const draws = Object.entries(run().draws);
  byId('draw').replaceChildren(...draws.map(([draw, words]) => el('option', { value: draw, selected: draw === state.draw }, words)));
  byId('draw-label').hidden = draws.length < 2;
  byId('run').replaceChildren(...page.runs.map(one => el('option', { value: one.index, selected: one.index === state.run }, `${one.letter} ${visibleString(one.name)}`)));
  byId('run-label').hidden = !isComparing();
}

function play() {
  const steps = run().shownSteps;
  const stop = () => {
    clearInterval(playing);
    playing = null;
    setText(byId('play'), 'play');
  };
  if (playing) return stop();
  if (steps.indexOf(state.step) === steps.length - 1) update({ step: steps[0] });
  setText(byId('play'), 'pause');
  playing = setInterval(() => {
    moveStep(1);
    if (steps.indexOf(state.step) === steps.length - 1) stop();
  }, PLAY_MILLISECONDS);
  return undefined;
}

function changeTheme() {
  document.documentElement.dataset.theme = isDark() ? 'light' : 'dark';
  repaint();
}

// Canvases do not follow the style sheet.
function repaint() {
  heatmap.paint();
  reader.choose();
  refillTables();
}

const refillTables = () => document.querySelectorAll('details[open]').forEach(details => details.dispatchEvent(new Event('toggle')));

const KEYS = {
  ArrowLeft: () => moveStep(-1),
  ArrowRight: () => moveStep(1),
  j: () => reader.move(1),
  k: () => reader.move(-1),
  n: () => update({ missed: !state.missed }),
  p: play,
  z: () => update({ zoom: null }),
  t: changeTheme,
  '/': () => byId('search').focus(),
  '?': () => byId('help').showModal(),
};

function keyboard() {
  document.addEventListener('keydown', event => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches('input, select, textarea, dialog *')) {
      if (event.key === 'Escape') event.target.blur();
      return;
    }
    const act = KEYS[event.key];
    if (!act || (event.target.matches('[role=option]') && event.key.startsWith('Arrow'))) return;
    event.preventDefault();
    act();
  });
}

function surroundings() {
  let width = 0;
  let timer;
  // Of the width alone: a readout that grows by a line must not redraw the charts under the pointer.
  new ResizeObserver(([entry]) => {
    const now = Math.round(entry.contentRect.width);
    if (now === width) return;
    width = now;
    clearTimeout(timer);
    timer = setTimeout(redraw, 60);
  }).observe(document.querySelector('main'));
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', repaint);
  addEventListener('hashchange', () => {
    update(fromAddress());
  });
  for (const [event, isBefore] of [['beforeprint', true], ['afterprint', false]]) {
    addEventListener(event, () => {
      isPrinting = isBefore;
      // Drawn at the width of the paper, or letters would shrink with the charts.
      document.body.classList.toggle('printing', isBefore);
      redraw();
    });
  }
}

let regimeMap;
function redraw() {
  drawCharts();
  regimeMap.draw();
  heatmap.paint();
  reader.choose();
}

// News from the server: the series anew, with the reader's choices as they are.
async function follow() {
  try {
    const answer = await fetch('series.json', { headers: page.tag ? { 'If-None-Match': page.tag } : {} });
    if (answer.status !== 304 && !answer.ok) throw new Error(`status ${answer.status}`);
    setText(byId('news'), '');
    if (answer.status === 200 && answer.headers.get('ETag') !== page.tag) {
      page.tag = answer.headers.get('ETag');
      renew(await answer.json());
    }
  } catch (error) {
    setText(byId('news'), `The server does not answer (${error.message}); what you see is the last it said.`);
  }
  setTimeout(follow, POLL_MILLISECONDS);
}

function renew(series) {
  const before = run();
  const wasLast = state.step === null || state.step === before.shownSteps[before.shownSteps.length - 1];
  page.runs = [series];
  prepare(series, 0);
  scoredCache.clear();
  const { shownSteps: steps } = series;
  const step = wasLast ? steps[steps.length - 1] ?? null : nearestStep(steps, state.step);
  if (!series.draws[state.draw]) state.draw = Object.keys(series.draws)[0];
  // Charts are made anew only when there are other ones, so that a drag over them goes on.
  if (JSON.stringify(series.charts) !== JSON.stringify(before.charts)) makeCharts();
  showVerdict();
  environmentCharts();
  redraw();
  refillTables();
  if (step === state.step) showScored();
  update({ step });
  showControls();
}

async function start() {
  await loadSeries();
  Object.assign(state, fromAddress());
  makeCharts();
  heatmap = new Heatmap();
  reader = new TraceReader();
  regimeMap = new RegimeMap();
  showVerdict();
  runsTable();
  environmentCharts();
  controls();
  followCharts();
  on(['run'], showVerdict);
  on(['measure'], environmentCharts);
  on(['trace'], () => heatmap.markRow());
  on(['step', 'run', 'draw'], showScored);
  lazy('step-table', stepTable, ['run', 'draw']);
  lazy('number-table', numberTable, ['run']);
  redraw();
  surroundings();
  keyboard();
  await showScored();
  if (page.live) setTimeout(follow, POLL_MILLISECONDS);
  document.body.dataset.ready = 'yes';
}

function failed(error) {
  const note = byId('error');
  note.hidden = false;
  note.textContent = `This page could not be drawn: ${error.message}`;
}

start().catch(failed);
