package session

import (
	"bufio"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/homearchive"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
)

// SavedHome describes a repository's saved home: what its last session left for its next
// one. The sessions with a label have their own.
type SavedHome struct {
	RepoKey string    `json:"repo_key"`
	Label   string    `json:"label,omitempty"`
	Repo    string    `json:"repo"`
	Session string    `json:"session"` // the last session
	SavedAt time.Time `json:"saved_at"`
	Size    int64     `json:"size"` // bytes
}

// A saved home is one file: a line of JSON, which is SavedHome without its size, and then
// an archive of package homearchive as the guest wrote it. The host never reads the
// archive. Because both are in one file, one rename replaces both: a half-written file is
// never used, and no archive is restored for another repository or label than the line names.
const (
	savedHomeSuffix    = ".home"
	maxSavedHomeHeader = 8 << 10 // maximum length of the line, in bytes
)

// SavedHomes are the saved homes of all repositories.
type SavedHomes struct{ Paths config.Paths }

// Name returns the key of the repository, and the label after an "@".
func (k SavedHome) Name() string { return withLabel(k.RepoKey, k.Label) }

func (h SavedHomes) file(repoKey, label string) string {
	if label != "" {
		repoKey += "\x00" + label
	}
	sum := sha256.Sum256([]byte(repoKey))
	return filepath.Join(h.Paths.SavedHomes(), hex.EncodeToString(sum[:16])+savedHomeSuffix)
}

// partSuffix is added to the name of a saved home that is being written.
const partSuffix = ".new"

// Leftovers returns a pattern for the files that killed processes were writing.
func (h SavedHomes) Leftovers() string { return filepath.Join(h.Paths.SavedHomes(), "*"+partSuffix) }

// write replaces the saved home of k.RepoKey and k.Label with what from writes, if that is
// complete and at most this many bytes long. An empty archive removes the saved home.
// The secrets of redact are overwritten without changing the length. Only the keeper
// of the one session with that label calls write.
func (h SavedHomes) write(ctx context.Context, k SavedHome, most int64, redact *secret.Redactor, from func(context.Context, io.Writer) error) error {
	line, err := json.Marshal(k)
	if err != nil {
		return err
	}
	file := h.file(k.RepoKey, k.Label)
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		return fail.New(fail.Host, "create directory of saved homes: %w", err)
	}
	part := file + partSuffix // always the same name, so leftovers of a crash are replaced
	if err := os.Remove(part); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fail.New(fail.Host, "write saved home: %w", err)
	}
	f, err := os.OpenFile(part, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fail.New(fail.Host, "write saved home: %w", err)
	}
	defer os.Remove(part)
	defer f.Close()
	if _, err := f.Write(append(line, '\n')); err != nil {
		return fail.New(fail.Host, "write saved home: %w", err)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	sink := &sink{w: f, left: most, fail: cancel}
	mask := redact.Mask(sink)
	if err := from(ctx, mask); err != nil {
		return cmp.Or(sink.err, err)
	}
	if err := errors.Join(mask.Close(), sink.err, f.Sync(), f.Close()); err != nil {
		return fail.New(fail.Host, "write saved home: %w", err)
	}
	if !homearchive.IsArchive(sink.start) {
		return errors.New("the guest did not send an archive; perhaps its shell startup files print something")
	}
	if most-sink.left <= homearchive.EmptySize {
		err = os.Remove(file) // the archive is empty: nothing to keep
		if errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
	} else {
		err = os.Rename(part, file)
	}
	if err != nil {
		return fail.New(fail.Host, "write saved home: %w", err)
	}
	return nil
}

// sink accepts what a guest sends, up to a limit. After an error it discards the
// rest, so that guest and host cannot block each other, and calls fail.
type sink struct {
	w     io.Writer
	left  int64
	fail  context.CancelCauseFunc
	start []byte // the first bytes
	err   error
}

func (s *sink) Write(p []byte) (int, error) {
	if s.err != nil {
		return len(p), nil //nolint:nilerr // reported at the end
	}
	s.start = append(s.start, p[:min(len(p), 16-min(len(s.start), 16))]...)
	if s.left -= int64(len(p)); s.left < 0 {
		s.err = errors.New("the guest sent more than limits.saved_home")
	} else if _, s.err = s.w.Write(p); s.err != nil {
		s.err = fail.New(fail.Host, "write saved home: %w", s.err)
	}
	if s.err != nil {
		s.fail(s.err)
	}
	return len(p), nil
}

// fallback returns the label of the saved home for a session with that label: the same one, or
// none if that does not exist.
func (h SavedHomes) fallback(repoKey, label string) string {
	if _, err := os.Lstat(h.file(repoKey, label)); errors.Is(err, fs.ErrNotExist) {
		return ""
	}
	return label
}

// open opens a saved home; it returns nil when none exists.
func (h SavedHomes) open(repoKey, label string) (*os.File, io.Reader, error) {
	f, err := os.Open(h.file(repoKey, label))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, fail.New(fail.Host, "read saved home: %w", err)
	}
	k, archive, err := readSavedHome(f)
	if err == nil && (k.RepoKey != repoKey || k.Label != label) {
		err = fmt.Errorf("%s belongs to %s", f.Name(), k.Name())
	}
	if err != nil {
		f.Close()
		return nil, nil, err
	}
	return f, archive, nil
}

func readSavedHome(f *os.File) (SavedHome, io.Reader, error) {
	r := bufio.NewReaderSize(f, maxSavedHomeHeader)
	line, err := r.ReadSlice('\n')
	var k SavedHome
	if err == nil {
		err = json.Unmarshal(line, &k)
	}
	info, serr := f.Stat()
	if err := errors.Join(err, serr); err != nil {
		return SavedHome{}, nil, fmt.Errorf("%s is damaged: %w", f.Name(), err)
	}
	k.Size = info.Size() - int64(len(line))
	return k, r, nil
}

// List returns all saved homes, sorted by repository.
func (h SavedHomes) List() ([]SavedHome, error) {
	files, err := filepath.Glob(filepath.Join(h.Paths.SavedHomes(), "*"+savedHomeSuffix))
	if err != nil {
		return nil, err
	}
	all := make([]SavedHome, 0, len(files))
	for _, name := range files {
		f, err := os.Open(name)
		if errors.Is(err, fs.ErrNotExist) { // removed meanwhile
			continue
		}
		if err != nil {
			return nil, fail.New(fail.Host, "read saved home: %w", err)
		}
		k, _, err := readSavedHome(f)
		f.Close()
		if err != nil {
			return nil, fail.New(fail.Host, "%w", err).WithHint("rm %s", name)
		}
		all = append(all, k)
	}
	slices.SortFunc(all, func(a, b SavedHome) int { return cmp.Compare(a.Name(), b.Name()) })
	return all, nil
}

// Remove removes a saved home and returns its name. what is that name or the repository's
// short name with the label. A live session saves its home again when it stops.
func (h SavedHomes) Remove(what string) (name string, err error) {
	all, err := h.List()
	if err != nil {
		return "", err
	}
	for _, match := range []func(SavedHome) bool{
		func(k SavedHome) bool { return k.Name() == what },
		func(k SavedHome) bool {
			base, ok := strings.CutSuffix(what, withLabel("", k.Label))
			return ok && strings.EqualFold(filepath.Base(k.Repo), base)
		},
	} {
		var found []SavedHome
		for _, k := range all {
			if match(k) {
				found = append(found, k)
			}
		}
		switch {
		case len(found) == 1:
			err := os.Remove(h.file(found[0].RepoKey, found[0].Label))
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return "", fail.New(fail.Host, "remove saved home: %w", err)
			}
			return found[0].Name(), nil
		case len(found) > 1:
			return "", fail.New(fail.Usage, "%q could be any of %d repositories", what, len(found)).WithHint("agent-sessionizer home list")
		}
	}
	return "", fail.New(fail.NotFound, "no saved home for %q", what).WithHint("agent-sessionizer home list")
}
