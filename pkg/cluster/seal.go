package cluster

import (
	"bytes"
	"encoding/json"
	"io"

	"filippo.io/age"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// maxSealed limits what a host seals and opens, in bytes: as base64, it fits into a message of NATS.
const maxSealed = 720 << 10

// sealedSecrets is what is encrypted: secrets, as package secret encodes them, and the claim that they
// are for.
type sealedSecrets struct {
	Task  string `json:"task"`
	Fence uint64 `json:"fence"`
	Text  []byte `json:"text"`
}

// Seal encrypts secrets so that only the host with that recipient can read them, and only for
// one claim of a task. The format is that of age, https://age-encryption.org/v1.
func Seal(recipient, task string, fence uint64, secrets []byte) ([]byte, error) {
	text, err := json.Marshal(sealedSecrets{task, fence, secrets})
	if err != nil {
		return nil, err
	}
	if len(text) > maxSealed {
		return nil, fail.New(fail.Secret, "the secrets that task %s needs from its submitter are too large together: %d bytes when encoded, over the limit of %d", task, len(text), maxSealed)
	}
	return encrypt(recipient, text)
}

// encrypt encrypts text for the host with that recipient.
func encrypt(recipient string, text []byte) ([]byte, error) {
	to, err := age.ParseX25519Recipient(recipient)
	if err != nil {
		return nil, fail.New(fail.Failure, "encrypt for a host: its recipient is invalid: %w", err)
	}
	var out bytes.Buffer
	w, err := age.Encrypt(&out, to)
	if err == nil {
		_, err = w.Write(text)
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		return nil, fail.New(fail.Failure, "encrypt for a host: %w", err)
	}
	return out.Bytes(), nil
}

// decrypt decrypts what encrypt returned for this host.
func (k *Keys) decrypt(text []byte) ([]byte, error) {
	r, err := age.Decrypt(bytes.NewReader(text), k.age)
	if err != nil {
		return nil, fail.New(fail.Failure, "decrypt what was sent: it is not for this host: %w", err)
	}
	plain, err := io.ReadAll(io.LimitReader(r, maxSealed+1))
	if err == nil && len(plain) > maxSealed {
		err = fail.New(fail.Failure, "decrypt what was sent: it is larger than %d bytes", maxSealed)
	}
	return plain, err
}

// Open decrypts what Seal returned. It refuses secrets for another task or an earlier claim.
func (k *Keys) Open(text []byte, task string, fence uint64) ([]byte, error) {
	plain, err := k.decrypt(text)
	if err != nil {
		return nil, fail.New(fail.Failure, "open sealed secrets of task %s: %w", task, err)
	}
	var s sealedSecrets
	if json.Unmarshal(plain, &s) != nil {
		return nil, fail.New(fail.Failure, "open sealed secrets of task %s: they are damaged", task) // err may quote a secret
	}
	if s.Task != task || s.Fence != fence {
		return nil, fail.New(fail.Failure, "open sealed secrets of task %s: they are for another task or claim", task)
	}
	return s.Text, nil
}
