package guestproto_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

const secretPart = "c2VjcmV0LWhvc3Qta2V5"

func identity() guestproto.Identity {
	return guestproto.Identity{
		Hostname: "lima-blue", MachineID: strings.Repeat("0f", 16), BootID: "01234567-89ab-cdef-0123-456789abcdef",
		User: "agent", AuthorizedKey: "ssh-ed25519 AAAA",
		HostKey: "-----BEGIN OPENSSH PRIVATE KEY-----\n" + secretPart + "\n-----END OPENSSH PRIVATE KEY-----\n",
		MAC:     "52:55:55:01:02:03", Time: time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC), Seed: bytes.Repeat([]byte{7}, 32),
	}
}

func encode(t *testing.T, i guestproto.Identity) string {
	t.Helper()
	var b strings.Builder
	if err := i.Encode(&b); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestAnIdentityIsOneLine(t *testing.T) {
	line := encode(t, identity())
	if strings.Count(line, "\n") != 1 || !strings.HasSuffix(line, "\n") || len(line) > guestproto.MaxIdentity {
		t.Fatalf("Encode() = %q (%d bytes), want one line of at most %d bytes", line, len(line), guestproto.MaxIdentity)
	}
	got, err := guestproto.DecodeIdentity(strings.NewReader(line))
	if err != nil {
		t.Fatal(err)
	}
	want := identity()
	for name, v := range map[string]struct{ got, want string }{
		"HostKey":   {got.HostKey, want.HostKey},
		"MAC":       {got.MAC, want.MAC},
		"Seed":      {string(got.Seed), string(want.Seed)},
		"Hostname":  {got.Hostname, want.Hostname},
		"MachineID": {got.MachineID, want.MachineID},
		"BootID":    {got.BootID, want.BootID},
	} {
		if v.got != v.want {
			t.Errorf("%s after Encode and DecodeIdentity = %q, want %q", name, v.got, v.want)
		}
	}
	if !got.Time.Equal(want.Time) {
		t.Errorf("Time after Encode and DecodeIdentity = %v, want %v", got.Time, want.Time)
	}
}

func TestAnIdentityShowsNothing(t *testing.T) {
	i := identity()
	var log strings.Builder
	slog.New(slog.NewTextHandler(&log, nil)).Info("made", "identity", i)
	data, err := json.Marshal(map[string]any{"identity": i})
	if err != nil {
		t.Fatal(err)
	}
	for _, shown := range []string{log.String(), string(data), fmt.Sprint(i), fmt.Sprintf("%v %+v %#v %s", i, i, i, i), fmt.Sprint(&i)} {
		if strings.Contains(shown, secretPart) || !strings.Contains(shown, "redacted") {
			t.Errorf("formatted identity = %s, want it redacted", shown)
		}
	}
}

func TestABadIdentityIsRefused(t *testing.T) {
	for part, spoil := range map[string]func(*guestproto.Identity){
		"hostname":       func(i *guestproto.Identity) { i.Hostname = "a b" },
		"machine_id":     func(i *guestproto.Identity) { i.MachineID = strings.Repeat("0", 32) },
		"boot_id":        func(i *guestproto.Identity) { i.BootID = i.MachineID },
		"user":           func(i *guestproto.Identity) { i.User = "../root" },
		"authorized_key": func(i *guestproto.Identity) { i.AuthorizedKey += "\n" + i.AuthorizedKey },
		"host_key":       func(i *guestproto.Identity) { i.HostKey = secretPart },
		"mac":            func(i *guestproto.Identity) { i.MAC = "ff:ff:ff:ff:ff:ff" },
		"time":           func(i *guestproto.Identity) { i.Time = time.Time{} },
		"seed":           func(i *guestproto.Identity) { i.Seed = i.Seed[:31] },
	} {
		i := identity()
		spoil(&i)
		_, err := guestproto.DecodeIdentity(strings.NewReader(encode(t, i)))
		if err == nil || !strings.Contains(err.Error(), part) || strings.Contains(err.Error(), secretPart) {
			t.Errorf("DecodeIdentity with a bad %s: error %v, want one that names it, without the host key", part, err)
		}
	}
	line := encode(t, identity())
	for what, bad := range map[string]string{
		"cut":      line[:len(line)/2],
		"twice":    line + line,
		"too long": strings.Replace(line, `"ssh-`, `"ssh-`+strings.Repeat("A", guestproto.MaxIdentity), 1),
		"unknown":  strings.Replace(line, `{`, `{"more":1,`, 1),
		"version":  strings.Replace(line, `"version":`, `"version":9`, 1),
		"empty":    "",
	} {
		if _, err := guestproto.DecodeIdentity(strings.NewReader(bad)); err == nil || strings.Contains(err.Error(), secretPart) {
			t.Errorf("DecodeIdentity of a line that is %s: error %v, want one without the host key", what, err)
		}
	}
}

func FuzzDecodeIdentity(f *testing.F) {
	var b strings.Builder
	if err := identity().Encode(&b); err != nil {
		f.Fatal(err)
	}
	f.Add(b.String())
	f.Add("{}\n")
	f.Fuzz(func(t *testing.T, line string) {
		i, err := guestproto.DecodeIdentity(strings.NewReader(line))
		if err != nil {
			return
		}
		// An accepted identity is complete, fits in a line, and contains no path.
		if again := encode(t, i); len(again) > 2*guestproto.MaxIdentity || strings.ContainsAny(i.User+i.Hostname+i.MachineID+i.BootID, "/\n\x00") {
			t.Fatalf("DecodeIdentity accepted %q, which is %d bytes long when encoded, want at most %d and no path", line, len(again), 2*guestproto.MaxIdentity)
		}
	})
}
