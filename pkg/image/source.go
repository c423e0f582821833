package image

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// cloudPrefix begins the names of users' own cloud images. The first digits of the
// digest follow.
const cloudPrefix = "cloud"

// Resolve reads the name of an image, or the location of a user's own cloud image in
// the form of config.ParseImageRef. For a file without a digest, it computes the digest
// of the current content. A file with a digest is compared with it when the file is
// copied.
func Resolve(source string) (config.ImageRef, error) {
	ref, err := config.ParseImageRef(source, "")
	if err != nil || ref.Location == "" || ref.IsURL() {
		return ref, err
	}
	f, err := os.Open(ref.Location)
	if errors.Is(err, fs.ErrNotExist) {
		return ref, fail.New(fail.NotFound, "no image at %s", ref.Location).WithHint("agent-sessionizer image list")
	}
	if err != nil {
		return ref, fail.New(fail.Usage, "open image: %w", err)
	}
	defer f.Close()
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		return ref, fail.New(fail.Usage, "image %s: must be a file", ref.Location)
	}
	if ref.Digest != "" {
		return ref, nil // the driver compares it when it copies the file
	}
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return ref, fmt.Errorf("read image: %w", err)
	}
	ref.Digest = fmt.Sprintf("sha256:%x", h.Sum(nil))
	return ref, nil
}

// SourceName returns the name of the image that Find finds. It is short, and the same
// for the same content in any location.
func SourceName(source string) string {
	_, hex, ok := strings.Cut(source, "#sha256:")
	if !ok || len(hex) < 12 {
		return source
	}
	return cloudPrefix + hex[:12]
}

// Distribution returns the distribution that is passed to the provision scripts:
// "debian" for an image that Build makes, "ubuntu" for every cloud image.
func Distribution(source string) string {
	if source == Debian {
		return Debian
	}
	return Ubuntu
}
