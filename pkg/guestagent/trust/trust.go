// Package trust makes the guest trust the certificate authority of its gateway: the guest's
// own programs, and those in containers.
package trust

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
)

const (
	// What update-ca-certificates(8) reads and writes.
	ownFile  = "/usr/local/share/ca-certificates/agent-sessionizer.crt"
	certsDir = "/etc/ssl/certs"
	bundle   = certsDir + "/ca-certificates.crt"
	hooksDir = "/etc/ca-certificates/update.d" // a JVM's store, for example

	maxCertificate = 64 << 10 // bytes of PEM
	maxBundle      = 16 << 20
)

// Set makes the guest trust the certificate that in has as PEM, instead of the one of the call
// before.
func Set(ctx context.Context, g sys.Guest, in io.Reader) error {
	if err := g.NeedRoot("trust"); err != nil {
		return err
	}
	text, err := io.ReadAll(io.LimitReader(in, maxCertificate))
	if err != nil {
		return fmt.Errorf("read the gateway's certificate: %w", err)
	}
	block, _ := pem.Decode(text)
	if block == nil {
		return fail.New(fail.Usage, "the gateway's certificate must be PEM")
	}
	if _, err := x509.ParseCertificate(block.Bytes); err != nil {
		return fail.New(fail.Usage, "the gateway's certificate: %w", err)
	}
	text = pem.EncodeToMemory(block)

	own := g.Path(ownFile)
	before, err := os.ReadFile(own)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := sys.WriteFile(own, text, 0o644); err != nil {
		return err
	}
	// update-ca-certificates takes seconds in an emulated guest, because it looks at every
	// certificate. Without hooks, the same can be done for one.
	if len(sys.Names(g.Path(hooksDir), 1)) > 0 && !g.Fake {
		return sys.Perform(ctx, "", "update-ca-certificates")
	}
	if err := addToBundle(g, before, text); err != nil || g.Fake {
		return err
	}
	return link(ctx, g)
}

// addToBundle replaces the certificate before, if the bundle has it, by now.
func addToBundle(g sys.Guest, before, now []byte) error {
	path := g.Path(bundle)
	all, err := sys.ReadFile(path, maxBundle)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if len(before) > 0 {
		all = bytes.ReplaceAll(all, before, nil)
	}
	all = bytes.ReplaceAll(all, now, nil) // of an interrupted call
	if len(all) > 0 && !bytes.HasSuffix(all, []byte("\n")) {
		all = append(all, '\n')
	}
	return sys.WriteFile(path, append(all, now...), 0o644)
}

// link makes the link by which OpenSSL finds a certificate in a directory: its name is a hash
// of the subject, and a number that tells certificates with the same hash apart.
func link(ctx context.Context, g sys.Guest) error {
	hash, err := sys.Run(ctx, "", "openssl", "x509", "-in", g.Path(ownFile), "-noout", "-subject_hash")
	if err != nil {
		return err
	}
	target := filepath.Join(g.Path(certsDir), "agent-sessionizer.pem")
	if err := linkTo(ownFile, target); err != nil {
		return err
	}
	for n := range 100 {
		name := fmt.Sprintf("%s.%d", filepath.Join(g.Path(certsDir), strings.TrimSpace(hash)), n)
		old, err := os.Readlink(name)
		if errors.Is(err, fs.ErrNotExist) || err == nil && filepath.Base(old) == filepath.Base(target) {
			return linkTo(filepath.Base(target), name)
		}
	}
	return fmt.Errorf("no free name for a link to %s", ownFile)
}

func linkTo(target, name string) error {
	if old, err := os.Readlink(name); err == nil && old == target {
		return nil
	}
	if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.Symlink(target, name)
}
