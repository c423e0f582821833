package session

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestclient"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/homearchive"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
)

// archive returns what a guest sends of a home directory with one transcript.
func archive(t *testing.T, transcript string) []byte {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "transcript"), []byte(transcript), 0o600); err != nil {
		t.Fatal(err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	var b bytes.Buffer
	if _, err := homearchive.Save(&b, root, homearchive.SaveOptions{Patterns: homearchive.Patterns{"transcript"}, Bounds: homearchive.SaveBounds(1 << 20)}); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// sends returns a guest that sends b in small pieces, as a connection does.
func sends(b []byte) func(context.Context, io.Writer) error {
	return func(_ context.Context, w io.Writer) error {
		_, err := io.Copy(w, iotest.OneByteReader(bytes.NewReader(b)))
		return err
	}
}

// savedArchive returns the archive of a repository's saved home, or "" when none exists.
func savedArchive(t *testing.T, m *Manager, key string) string {
	t.Helper()
	f, r, err := SavedHomes{Paths: m.Config.Paths}.open(key, "")
	if err != nil {
		t.Fatal(err)
	}
	if f == nil {
		return ""
	}
	defer f.Close()
	b, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestSavedHome(t *testing.T) {
	m := newManager(t)
	a, b := SavedHome{RepoKey: "github.com/o/a", Repo: "o/a", Session: "agent-o-a-1", SavedAt: time.Unix(1, 0).UTC()}, SavedHome{RepoKey: "local:/o/a", Repo: "a"}
	if all, err := (SavedHomes{Paths: m.Config.Paths}).List(); err != nil || all == nil || len(all) != 0 {
		t.Errorf("SavedHomes at first = %v, %v, want an empty list", all, err)
	}
	if got := savedArchive(t, m, a.RepoKey); got != "" {
		t.Errorf("saved home of %s = %q, want none", a.RepoKey, got)
	}
	for _, k := range []SavedHome{b, a, a} {
		text := archive(t, "of "+k.RepoKey)
		if err := (SavedHomes{Paths: m.Config.Paths}).write(t.Context(), k, 2000, nil, sends(text)); err != nil {
			t.Fatal(err)
		}
		if got := savedArchive(t, m, k.RepoKey); got != string(text) {
			t.Errorf("saved home of %s = %q, want %q", k.RepoKey, got, text)
		}
	}
	all, err := SavedHomes{Paths: m.Config.Paths}.List()
	if err != nil || len(all) != 2 || all[1].RepoKey != b.RepoKey {
		t.Fatalf("SavedHomes = %v, %v, want 2, the second of %s", all, err, b.RepoKey)
	}
	a.Size = int64(len(archive(t, "of "+a.RepoKey)))
	if all[0] != a {
		t.Errorf("saved home = %+v, want %+v", all[0], a)
	}
	for _, dir := range []string{m.Config.Paths.SavedHomes(), SavedHomes{Paths: m.Config.Paths}.file(a.RepoKey, "")} {
		if st, err := os.Stat(dir); err != nil || st.Mode().Perm()&0o077 != 0 {
			t.Errorf("mode of %s = %v, %v, want no access for others", dir, st, err)
		}
	}
	// "a" is the short name of both; no repository has the key o/a.
	for what, code := range map[string]fail.Code{"a": fail.Usage, "o/a": fail.NotFound, "nobody/nothing": fail.NotFound} {
		if _, err := (SavedHomes{Paths: m.Config.Paths}).Remove(what); fail.CodeOf(err) != code {
			t.Errorf("Remove(%q) = %v, want code %v", what, err, code)
		}
	}
	if key, err := (SavedHomes{Paths: m.Config.Paths}).Remove(b.RepoKey); err != nil || key != b.RepoKey {
		t.Errorf("Remove(%q) = %q, %v, want %q", b.RepoKey, key, err, b.RepoKey)
	}
	if key, err := (SavedHomes{Paths: m.Config.Paths}).Remove("A"); err != nil || key != a.RepoKey {
		t.Errorf("Remove(A) = %q, %v, want %q", key, err, a.RepoKey)
	}
	if left, err := os.ReadDir(m.Config.Paths.SavedHomes()); err != nil || len(left) > 0 {
		t.Errorf("directory of saved homes = %v, %v, want it empty", left, err)
	}
}

// The saved home of one repository is never used for another, whatever file it is in.
func TestSavedHomeOfAnotherRepository(t *testing.T) {
	m := newManager(t)
	if err := (SavedHomes{Paths: m.Config.Paths}).write(t.Context(), SavedHome{RepoKey: "github.com/o/a"}, 2000, nil, sends(archive(t, "of a"))); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(SavedHomes{Paths: m.Config.Paths}.file("github.com/o/a", ""), SavedHomes{Paths: m.Config.Paths}.file("github.com/o/b", "")); err != nil {
		t.Fatal(err)
	}
	if f, _, err := (SavedHomes{Paths: m.Config.Paths}).open("github.com/o/b", ""); err == nil || f != nil {
		t.Errorf("open(github.com/o/b) with another repository's file = %v, want an error", err)
	}
}

// If saving fails in any way, the previous saved home stays, and nothing else is
// left.
func TestWriteSavedHomeIsWholeOrNothing(t *testing.T) {
	m := newManager(t)
	k := SavedHome{RepoKey: "github.com/o/a"}
	old := archive(t, "the old one")
	if err := (SavedHomes{Paths: m.Config.Paths}).write(t.Context(), k, 2000, nil, sends(old)); err != nil {
		t.Fatal(err)
	}
	// A killed keeper leaves this behind.
	if err := os.WriteFile(SavedHomes{Paths: m.Config.Paths}.file(k.RepoKey, "")+".new", []byte("half"), 0o644); err != nil {
		t.Fatal(err)
	}
	large := archive(t, strings.Repeat("x", 2001))
	for what, from := range map[string]func(context.Context, io.Writer) error{
		"the guest fails": func(ctx context.Context, w io.Writer) error {
			return errors.Join(sends(archive(t, "new")[:50])(ctx, w), errBoom)
		},
		"nothing comes":       sends(nil),
		"a shell that prints": sends(append([]byte("welcome\n"), archive(t, "new")...)),
		"too much":            sends(large),
		// The rest is discarded, so that the guest does not block, and the transfer
		// is cancelled.
		"without end": func(ctx context.Context, w io.Writer) error {
			for ctx.Err() == nil {
				if _, err := w.Write(large); err != nil {
					return err
				}
			}
			return context.Cause(ctx)
		},
	} {
		err := SavedHomes{Paths: m.Config.Paths}.write(t.Context(), k, 2000, nil, from)
		if err == nil {
			t.Errorf("write with %s = nil, want an error", what)
		}
		if (what == "too much" || what == "without end") && !strings.Contains(err.Error(), "limits.saved_home") {
			t.Errorf("write with %s = %v, want limits.saved_home", what, err)
		}
		if got := savedArchive(t, m, k.RepoKey); got != string(old) {
			t.Errorf("saved home after %s = %q, want the old one", what, got)
		}
		if left, err := os.ReadDir(m.Config.Paths.SavedHomes()); err != nil || len(left) != 1 {
			t.Errorf("files after %s = %v, %v, want 1", what, left, err)
		}
	}
	// The old saved home stays in use while the new one is being written.
	fresh := archive(t, "new") // once: it has the time of its file
	err := SavedHomes{Paths: m.Config.Paths}.write(t.Context(), k, 2000, nil, func(ctx context.Context, w io.Writer) error {
		if err := sends(fresh)(ctx, w); err != nil {
			return err
		}
		if got := savedArchive(t, m, k.RepoKey); got != string(old) {
			t.Errorf("saved home during the write = %q, want the old one", got)
		}
		return nil
	})
	if err != nil || savedArchive(t, m, k.RepoKey) != string(fresh) {
		t.Errorf("write = %v, saved home %q, want nil, the new one", err, savedArchive(t, m, k.RepoKey))
	}
}

// A session whose archive is empty leaves no saved home.
func TestEmptyArchiveLeavesNoSavedHome(t *testing.T) {
	m := newManager(t)
	root, err := os.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	var empty bytes.Buffer
	if _, err := homearchive.Save(&empty, root, homearchive.SaveOptions{Bounds: homearchive.SaveBounds(1000)}); err != nil {
		t.Fatal(err)
	}
	k := SavedHome{RepoKey: "github.com/o/a"}
	for _, sent := range [][]byte{empty.Bytes(), archive(t, "something"), empty.Bytes()} {
		if err := (SavedHomes{Paths: m.Config.Paths}).write(t.Context(), k, 2000, nil, sends(sent)); err != nil {
			t.Fatal(err)
		}
		if all, err := (SavedHomes{Paths: m.Config.Paths}).List(); err != nil || (len(all) == 1) != (len(sent) > empty.Len()) {
			t.Errorf("SavedHomes after %d bytes = %v, %v, want one: %t", len(sent), all, err, len(sent) > empty.Len())
		}
	}
}

func TestSavedHomeHasNoSecrets(t *testing.T) {
	m := newManager(t)
	k := SavedHome{RepoKey: "github.com/o/a"}
	const token = "tok-0123456789-\"quoted\""
	sent := archive(t, "the token is "+token+", in JSON tok-0123456789-\\\"quoted\\\", and in hex 746f6b2d303132333435363738392d2271756f74656422")
	if err := (SavedHomes{Paths: m.Config.Paths}).write(t.Context(), k, 2000, secret.NewRedactor(secret.NewValue(token)), sends(sent)); err != nil {
		t.Fatal(err)
	}
	got := savedArchive(t, m, k.RepoKey)
	if len(got) != len(sent) || strings.Contains(got, "0123456789") || strings.Contains(got, "746f6b2d30") {
		t.Errorf("saved home = %q, want %d bytes without a secret", got, len(sent))
	}
	root, err := os.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	o := homearchive.RestoreOptions{First: true, Patterns: homearchive.Patterns{"transcript"}, Bounds: homearchive.SaveBounds(1 << 20)}
	if _, err := homearchive.Restore(root, strings.NewReader(got), o); err != nil {
		t.Fatal(err)
	}
	text, err := root.ReadFile("transcript")
	want := "the token is " + strings.Repeat("*", len(token)) + ", in JSON "
	if err != nil || !strings.HasPrefix(string(text), want) {
		t.Errorf("saved file = %q, %v, want the prefix %q", text, err, want)
	}
}

// A damaged file is reported and not used, and does not prevent other sessions from
// starting.
func TestDamagedSavedHome(t *testing.T) {
	m := newManager(t)
	if err := os.MkdirAll(m.Config.Paths.SavedHomes(), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"", "{}", "no JSON\n", strings.Repeat("x", 3*maxSavedHomeHeader) + "\n"} {
		if err := os.WriteFile(SavedHomes{Paths: m.Config.Paths}.file("github.com/o/a", ""), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if f, _, err := (SavedHomes{Paths: m.Config.Paths}).open("github.com/o/a", ""); err == nil || f != nil {
			t.Errorf("open of %.20q = %v, want an error", text, err)
		}
		if _, err := (SavedHomes{Paths: m.Config.Paths}).List(); !strings.HasPrefix(fail.HintOf(err), "rm ") {
			t.Errorf("SavedHomes with %.20q = %v (hint %q), want a hint with rm", text, err, fail.HintOf(err))
		}
	}
}

// A session requested by a client below admin gets none of the user's files.
func TestRestrictedSessionGetsNoHomeFiles(t *testing.T) {
	w := newWorker(t, driver{})
	w.Sessions.Config.Dotfiles = "/nowhere"
	if err := w.homeFiles().copyHomeFiles(t.Context(), Session{}, guestclient.Guest{}); err == nil {
		t.Error("copyHomeFiles of an unrestricted session = nil, want an error from looking for the dotfiles")
	}
	if err := w.homeFiles().copyHomeFiles(t.Context(), Session{Spec: Spec{Restricted: true}}, guestclient.Guest{}); err != nil {
		t.Error(err)
	}
}
