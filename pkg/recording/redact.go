package recording

import (
	"bytes"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// sink receives a terminal's output in pieces: text, and what is between text, one escape sequence or
// control character at a time.
type sink interface {
	text(p []byte)
	control(p []byte)
}

// cleaner removes secrets, and everything that only an interactive terminal needs, from the output of
// a program. It looks for secrets twice: in the bytes as they arrive, and in the text without what is between,
// because programs colour parts of a secret and break it into lines. It hides a secret in whatever pieces it is
// written.
type cleaner struct {
	raw    *secret.Writer
	screen *termtext.Filter
	masked *textMask
}

func newCleaner(redact *secret.Redactor, to sink) *cleaner {
	c := &cleaner{masked: newTextMask(redact, to)}
	c.screen = termtext.NewReplayFilter(c.masked)
	c.raw = redact.Writer(c.screen)
	return c
}

func (c *cleaner) Write(p []byte) (int, error) { return c.raw.Write(p) }

// holds reports whether something may begin a secret and is held back.
func (c *cleaner) holds() bool { return c.raw.Holds() || c.masked.mask.Holds() }

// Close passes on what was held back because it may have begun a secret. The cleaner can be used again.
func (c *cleaner) Close() error {
	if err := c.raw.Close(); err != nil {
		return err
	}
	if err := c.screen.Close(); err != nil {
		return err
	}
	return c.masked.flush()
}

// maxPending limits what a textMask remembers of the sequences within text that is held back.
const maxPending = 64 << 10

// textMask masks secrets in the text of a filtered stream. A masked secret has as many
// bytes as before, so every sequence keeps its place in the text.
type textMask struct {
	mask    *secret.Writer
	to      sink
	in, out int64    // bytes of text that were written to mask, and came out of it
	pending []placed // in their order
	size    int      // of pending
}

// placed is a sequence that follows a number of bytes of text.
type placed struct {
	after int64
	bytes []byte
}

func newTextMask(redact *secret.Redactor, to sink) *textMask {
	m := &textMask{to: to}
	m.mask = redact.Mask(maskedText{m})
	return m
}

// Write takes the output of a termtext.Filter: text, control characters and complete sequences.
func (m *textMask) Write(p []byte) (int, error) {
	n := len(p)
	for len(p) > 0 {
		size := bytes.IndexFunc(p, isControl)
		if size < 0 {
			size = len(p)
		}
		if size > 0 {
			m.in += int64(size)
			if _, err := m.mask.Write(p[:size]); err != nil {
				return 0, err
			}
			p = p[size:]
			continue
		}
		size = sequenceLength(p)
		if err := m.place(p[:size]); err != nil {
			return 0, err
		}
		p = p[size:]
	}
	return n, nil
}

// place puts a sequence behind the text so far.
func (m *textMask) place(p []byte) error {
	if m.out == m.in {
		m.to.control(p)
		return nil
	}
	m.pending = append(m.pending, placed{m.in, bytes.Clone(p)})
	if m.size += len(p) + 32; m.size > maxPending {
		return m.flush()
	}
	return nil
}

// flush passes on the text that is held back.
func (m *textMask) flush() error { return m.mask.Close() }

type maskedText struct{ m *textMask }

// Write receives masked text, and passes it on with the sequences within it.
func (t maskedText) Write(p []byte) (int, error) {
	m, n := t.m, len(p)
	for len(p) > 0 {
		size := len(p)
		if len(m.pending) > 0 {
			size = int(min(int64(size), m.pending[0].after-m.out))
		}
		if size > 0 {
			m.to.text(p[:size])
			m.out += int64(size)
			p = p[size:]
		}
		for len(m.pending) > 0 && m.pending[0].after == m.out {
			m.to.control(m.pending[0].bytes)
			m.size -= len(m.pending[0].bytes) + 32
			m.pending = m.pending[1:]
		}
	}
	return n, nil
}

func isControl(r rune) bool { return r < ' ' || r == 0x7f }

// sequenceLength returns the length of the control character or sequence at the start of p.
func sequenceLength(p []byte) int {
	if p[0] != 0x1b || len(p) == 1 {
		return 1
	}
	if p[1] == '[' {
		for i := 2; i < len(p); i++ {
			if p[i] >= '@' && p[i] <= '~' {
				return i + 1
			}
		}
		return len(p)
	}
	for i := 1; i < len(p); i++ { // intermediate characters, and the final one
		if p[i] >= '0' {
			return i + 1
		}
	}
	return len(p)
}
