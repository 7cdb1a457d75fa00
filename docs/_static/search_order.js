// SPDX-License-Identifier: Apache-2.0
// Sphinx's search: tutorials and guides come before the reference, and error pages last.
// Pages for contributors are not in it; see conf.py.
const weights = [
  [/^start\//, 1.5],
  [/^(guides|notebooks)\//, 1.4],
  [/^(concepts|glossary)/, 1.2],
  [/^errors\//, 0.6],
];

// eslint-disable-next-line no-unused-vars -- Sphinx's searchtools.js reads it
var Scorer = {
  score: (result) => {
    const [page, , , , score] = result;
    const [, weight] = weights.find(([pattern]) => pattern.test(page)) || [null, 1];
    return score * weight;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
