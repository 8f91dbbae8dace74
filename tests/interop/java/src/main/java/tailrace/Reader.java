package tailrace;

import com.couchbase.client.dcp.Client;
import com.couchbase.client.dcp.highlevel.DatabaseChangeListener;
import com.couchbase.client.dcp.highlevel.Deletion;
import com.couchbase.client.dcp.highlevel.DocumentChange;
import com.couchbase.client.dcp.highlevel.FlowControlMode;
import com.couchbase.client.dcp.highlevel.Mutation;
import com.couchbase.client.dcp.highlevel.Rollback;
import com.couchbase.client.dcp.highlevel.SnapshotDetails;
import com.couchbase.client.dcp.highlevel.StreamEnd;
import com.couchbase.client.dcp.highlevel.StreamFailure;
import com.couchbase.client.dcp.highlevel.StreamOffset;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.HexFormat;
import java.util.Map;

/**
 * Reads a bucket with java-dcp-client until stdin ends, and says on stdout what it is told, a word a line.
 *
 * <p>Arguments: HOST:PORT BUCKET USER PASSWORD
 */
public final class Reader implements DatabaseChangeListener {
  public static void main(String[] args) throws Exception {
    try (Client client = Client.builder()
        .seedNodes(args[0])
        .bucket(args[1])
        .credentials(args[2], args[3])
        .collectionsAware(true)
        .flowControl(1 << 20)
        .build()) {
      client.listener(new Reader(), FlowControlMode.AUTOMATIC);
      client.connect().block();
      say("connected", client.numPartitions(), 0);
      Map<Integer, StreamOffset> beginning = new HashMap<>();
      for (int vbucket = 0; vbucket < client.numPartitions(); vbucket++) {
        beginning.put(vbucket, StreamOffset.ZERO);
      }
      client.resumeStreaming(beginning).block();
      while (System.in.read() >= 0) {
        // until the test has seen enough
      }
    }
    System.exit(0);
  }

  private static synchronized void say(String what, int vbucket, long seqno, Object... more) {
    StringBuilder line = new StringBuilder(what).append(' ').append(vbucket).append(' ').append(seqno);
    for (Object word : more) {
      line.append(' ').append(word);
    }
    System.out.println(line);
    System.out.flush();
  }

  private static String hex(byte[] data) {
    return data.length == 0 ? "-" : HexFormat.of().formatHex(data);
  }

  private static void say(String what, DocumentChange change, byte[] value) {
    say(what, change.getVbucket(), change.getOffset().getSeqno(),
        hex(change.getKey().getBytes(StandardCharsets.UTF_8)), hex(value),
        change.getCas(), change.getRevision());
  }

  @Override
  public void onMutation(Mutation mutation) {
    say("mutation", mutation, mutation.getContent());
  }

  @Override
  public void onDeletion(Deletion deletion) {
    say("deletion", deletion, new byte[0]);
  }

  @Override
  public void onSnapshot(SnapshotDetails snapshot) {
    say("snapshot", snapshot.getVbucket(), snapshot.getMarker().getEndSeqno());
  }

  @Override
  public void onRollback(Rollback rollback) {
    say("rollback", rollback.getVbucket(), rollback.getSeqno());
    rollback.resume();
  }

  @Override
  public void onStreamEnd(StreamEnd end) {
    say("end", end.getVbucket(), 0, end.getReason());
  }

  @Override
  public void onFailure(StreamFailure failure) {
    say("failure", failure.getVbucket(), 0, failure.getCause());
  }
}
