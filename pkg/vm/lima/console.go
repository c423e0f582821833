package lima

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"unicode/utf8"

	"github.com/lima-vm/lima/pkg/store/filenames"
	"golang.org/x/crypto/ssh"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

const (
	maxLine    = 4 << 10 // a longer line is cut; a marker fits easily
	maxRead    = 1 << 20 // per read of one log
	keptLines  = 12      // quoted in errors
	quotedLine = 160
)

// consoles are the guest's serial logs of the current run. Architecture and VM
// manager decide which of them is ttyS0; only the guest writes to any of them.
var consoles = []string{filenames.SerialLog, filenames.SerialPCILog, filenames.SerialVirtioLog}

// watcher reads the consoles for the marker. Their whole content is hostile.
type watcher struct {
	logs    []*follower
	hostKey string   // set once the marker was seen
	asleep  bool     // whether the guest waits to be saved
	panic   string   // the line with which the guest's kernel panicked
	last    []string // the most recent lines, cleaned
}

func newWatcher(dir string) *watcher {
	w := &watcher{}
	for _, f := range consoles {
		w.logs = append(w.logs, &follower{path: filepath.Join(dir, f)})
	}
	return w
}

// readNew reads what is new.
func (w *watcher) readNew() error {
	for _, l := range w.logs {
		if err := l.read(w.line); err != nil {
			return err
		}
	}
	return nil
}

func (w *watcher) line(s string) {
	if c := clean(s); c != "" {
		w.last = append(w.last, c)
		w.last = w.last[max(0, len(w.last)-keptLines):]
	}
	if w.hostKey == "" {
		w.hostKey = parseMarker(s)
	}
	w.asleep = w.asleep || strings.TrimSpace(s) == guestproto.AsleepMarker
	if w.panic == "" && strings.Contains(s, "Kernel panic - not syncing") {
		w.panic = clean(s)
	}
}

// parseMarker returns the host key of a marker line, in the form that ssh itself
// would print, or "". Anything may precede the marker, because output to consoles
// interleaves.
func parseMarker(line string) string {
	_, rest, ok := strings.Cut(line, vm.ReadyMarker+" ")
	if !ok {
		return ""
	}
	f := strings.Fields(rest)
	if len(f) < 2 {
		return ""
	}
	key, _, options, _, err := ssh.ParseAuthorizedKey([]byte(f[0] + " " + f[1]))
	if err != nil || len(options) > 0 {
		return ""
	}
	switch key.Type() {
	case ssh.KeyAlgoED25519, ssh.KeyAlgoECDSA256, ssh.KeyAlgoECDSA384, ssh.KeyAlgoECDSA521, ssh.KeyAlgoRSA:
		return strings.TrimSpace(string(ssh.MarshalAuthorizedKey(key)))
	}
	return "" // certificates and security keys: no sshd offers these as its own key
}

// clean makes a console line safe to show: no control bytes, no escape sequences, and
// limited in length.
func clean(s string) string {
	var b strings.Builder
	escape := false
	for _, r := range s {
		switch {
		case r == 0x1b:
			escape = true
		case escape: // CSI … letter; other sequences have one or two bytes
			escape = r != '~' && (r < 'A' || r > 'Z') && (r < 'a' || r > 'z')
		case r == '\t':
			b.WriteByte(' ')
		case r < 0x20 || r >= 0x7f && r < 0xa0 || r == utf8.RuneError || r >= 0x200b && r <= 0x202e || r >= 0x2066 && r <= 0x2069:
		default:
			b.WriteRune(r)
		}
		if b.Len() >= quotedLine {
			break
		}
	}
	return strings.TrimSpace(b.String())
}

// follower reads a growing file line by line with bounded memory.
type follower struct {
	path string
	off  int64
	buf  []byte // the unfinished line, at most maxLine
}

func (f *follower) read(line func(string)) error {
	r, err := os.Open(f.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer r.Close()
	if st, err := r.Stat(); err != nil {
		return err
	} else if st.Size() < f.off { // truncated by the host agent, see limitLogs
		f.off, f.buf = 0, nil
	}
	chunk := make([]byte, 64<<10)
	for total := 0; total < maxRead; {
		n, err := r.ReadAt(chunk, f.off)
		f.off += int64(n)
		total += n
		f.feed(chunk[:n], line)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (f *follower) feed(b []byte, line func(string)) {
	for _, c := range b {
		switch {
		case c == '\n' || c == '\r':
			if len(f.buf) > 0 {
				line(string(f.buf))
			}
			f.buf = f.buf[:0]
		case c == 0: // holes of a truncated log
		case len(f.buf) < maxLine:
			f.buf = append(f.buf, c)
		}
	}
}
